"""Typed contracts of ds: msgspec structs, codecs and the event stream."""

from ds_spec import events
from ds_spec.codec import AnySpec, decode_json, decode_msgpack, encode_json, encode_msgpack, json_schema
from ds_spec.cost import CostItem, CostReport, Finding
from ds_spec.event import CommEvent, IoEvent, MemoryEvent, SpanEvent
from ds_spec.mesh import MeshSpec
from ds_spec.tensor import ShardLayout, ShardPiece, TensorSpec

__all__ = [
    "AnySpec",
    "CommEvent",
    "CostItem",
    "CostReport",
    "Finding",
    "IoEvent",
    "MemoryEvent",
    "MeshSpec",
    "ShardLayout",
    "ShardPiece",
    "SpanEvent",
    "TensorSpec",
    "decode_json",
    "decode_msgpack",
    "encode_json",
    "encode_msgpack",
    "events",
    "json_schema",
]
