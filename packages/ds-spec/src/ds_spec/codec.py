"""Contracts to JSON and MessagePack and back, checked on the way in."""

from typing import Any, TypeVar

import msgspec

from ds_spec.cost import CostItem, CostReport, Finding
from ds_spec.event import CommEvent, IoEvent, MemoryEvent, SpanEvent
from ds_spec.mesh import MeshSpec
from ds_spec.tensor import ShardLayout, ShardPiece, TensorSpec

AnySpec = (
    MeshSpec
    | TensorSpec
    | ShardPiece
    | ShardLayout
    | CommEvent
    | SpanEvent
    | MemoryEvent
    | IoEvent
    | CostItem
    | CostReport
    | Finding
)
SpecT = TypeVar("SpecT", bound=msgspec.Struct)


def encode_json(spec: AnySpec, *, indent: int | None = None) -> bytes:
    """``spec`` as UTF-8 JSON; its ``type`` field names the struct."""
    encoded = msgspec.json.encode(spec)
    return encoded if indent is None else msgspec.json.format(encoded, indent=indent)


def decode_json(data: bytes | str, kind: type[SpecT] | Any = AnySpec) -> Any:
    """The struct in ``data``.

    Args:
        data: JSON as :func:`encode_json` writes it.
        kind: the struct expected, or any.

    Raises:
        msgspec.ValidationError: an unknown field, a wrong type or a value the struct refuses; with its path.
        msgspec.DecodeError: not JSON.
    """
    return msgspec.json.decode(data, type=kind)


def encode_msgpack(spec: AnySpec) -> bytes:
    """``spec`` as MessagePack."""
    return msgspec.msgpack.encode(spec)


def decode_msgpack(data: bytes, kind: type[SpecT] | Any = AnySpec) -> Any:
    """The struct in ``data``; errors as :func:`decode_json`."""
    return msgspec.msgpack.decode(data, type=kind)


def json_schema() -> dict[str, Any]:
    """JSON schema of every struct, for tools in other languages."""
    return msgspec.json.schema(AnySpec)
