"""What numbers in a contract may be; each struct says which of its fields are what."""

import math
from typing import Any

VERSION = 1


def check_fields(spec: Any, *, counts: tuple[str, ...] = (), seconds: tuple[str, ...] = ()) -> None:
    """Refuse what cannot be, in a struct that has a ``version``.

    Args:
        spec: the struct.
        counts: fields that are whole numbers, >= 0.
        seconds: fields that are finite numbers; JSON has no others.

    Raises:
        TypeError: a count that is not an ``int``.
        ValueError: a negative count, a time that is not finite, or a version that this ds-spec does not know.
    """
    kind = type(spec).__name__
    if spec.version != VERSION:
        advice = "read it with the ds-spec that wrote it or a newer one"
        raise ValueError(f"{kind}.version must be {VERSION}, got {spec.version}; {advice}")
    for name in counts:
        count = getattr(spec, name)
        if type(count) is not int:
            raise TypeError(f"{kind}.{name} must be an int, got {count!r} of type {type(count).__name__}")
        if count < 0:
            raise ValueError(f"{kind}.{name} must not be negative, got {count}")
    for name in seconds:
        if not math.isfinite(getattr(spec, name)):
            raise ValueError(f"{kind}.{name} must be finite, got {getattr(spec, name)}")


def check_order(spec: Any) -> None:
    """Refuse a stretch of time that ends before it begins."""
    if spec.end_s < spec.begin_s:
        raise ValueError(
            f"{type(spec).__name__} must not end before it begins, got {spec.begin_s} s to {spec.end_s} s"
        )
