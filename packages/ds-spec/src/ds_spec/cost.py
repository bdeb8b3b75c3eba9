"""What a plan costs, beside the limit that no implementation can beat, and what to do about it."""

import msgspec

from ds_spec.checks import check_fields


class CostItem(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True, tag="cost_item"):
    """Cost of one component on one rank; zero where a measure does not apply."""

    name: str
    time_s: float = 0.0
    bytes_held: int = 0
    bytes_sent: int = 0
    compute_flops: int = 0
    version: int = 1

    def __post_init__(self) -> None:
        check_fields(self, counts=("bytes_held", "bytes_sent", "compute_flops"), seconds=("time_s",))


class Finding(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True, tag="finding"):
    """Advice: what was seen, what to do, and what that is expected to save."""

    title: str
    advice: str
    gain_s: float = 0.0
    gain_bytes: int = 0
    version: int = 1

    def __post_init__(self) -> None:
        check_fields(self, counts=("gain_bytes",), seconds=("gain_s",))


class CostReport(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True, tag="cost_report"):
    """Predicted or measured cost by component.

    Attributes:
        source: ``planned`` or ``measured``.
        items: one per component.
        limit_s: time that the machine's bandwidth and arithmetic allow at best, 0 when unknown.
        limit_bytes: bytes that the method needs at least, 0 when unknown.
        findings: advice, the largest gain first.
    """

    source: str
    items: tuple[CostItem, ...]
    limit_s: float = 0.0
    limit_bytes: int = 0
    findings: tuple[Finding, ...] = ()
    version: int = 1

    def __post_init__(self) -> None:
        if self.source not in ("planned", "measured"):
            raise ValueError(f"CostReport.source must be 'planned' or 'measured', got {self.source!r}")
        check_fields(self, counts=("limit_bytes",), seconds=("limit_s",))
        names = [item.name for item in self.items]
        if repeated := sorted({name for name in names if names.count(name) > 1}):
            raise ValueError(
                f"CostReport needs one item per component, got {repeated} twice; add them up first"
            )

    @property
    def bytes_held(self) -> int:
        """Bytes of all components."""
        return sum(item.bytes_held for item in self.items)
