"""Contracts survive a round trip, refuse what they do not know, and old files keep decoding."""

import json
import runpy
from pathlib import Path
from typing import get_args

import jsonschema
import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

import ds_spec
from ds_spec.codec import AnySpec

FOLDER = Path(__file__).parent
EXAMPLES = sorted((FOLDER / "examples").glob("*/*.json"))
KINDS = get_args(AnySpec)

counts = st.integers(0, 2**63 - 1)
times = st.floats(allow_nan=False, allow_infinity=False)
stretches = st.tuples(times, times).map(sorted)


def structs(kind, **fields):
    return st.builds(kind, **{"version": st.just(1), **fields})


def timed(kind, **fields):
    return stretches.flatmap(
        lambda ends: structs(kind, begin_s=st.just(ends[0]), end_s=st.just(ends[1]), rank=counts, **fields)
    )


meshes = st.lists(st.sampled_from(["pp", "dp", "sp", "tp", "ep"]), unique=True, max_size=4).flatmap(
    lambda axes: structs(
        ds_spec.MeshSpec, axes=st.just(tuple(axes)), sizes=st.tuples(*[st.integers(1, 4)] * len(axes))
    )
)
tensors = structs(
    ds_spec.TensorSpec, name=st.text(min_size=1), shape=st.lists(st.integers(0, 9), max_size=4).map(tuple)
)
pieces = structs(ds_spec.ShardPiece, rank=counts, start_numel=counts, numel=counts, buffer_start_numel=counts)
items = structs(ds_spec.CostItem, time_s=times, bytes_held=counts, bytes_sent=counts, compute_flops=counts)
findings = structs(ds_spec.Finding, gain_s=times, gain_bytes=counts)


@st.composite
def layouts(draw):
    world_size = draw(st.integers(1, 5))
    listed = draw(st.lists(tensors, unique_by=lambda tensor: tensor.name, max_size=3))
    cut = []
    for tensor in listed:
        start = draw(st.integers(0, tensor.numel))
        cut.append(
            ds_spec.ShardPiece(
                tensor=tensor.name,
                rank=draw(st.integers(0, world_size - 1)),
                start_numel=start,
                numel=draw(st.integers(0, tensor.numel - start)),
                buffer=draw(st.text()),
                buffer_start_numel=draw(counts),
            )
        )
    return ds_spec.ShardLayout(world_size=world_size, tensors=tuple(listed), pieces=tuple(cut))


SPECS = {
    ds_spec.MeshSpec: meshes,
    ds_spec.TensorSpec: tensors,
    ds_spec.ShardPiece: pieces,
    ds_spec.ShardLayout: layouts(),
    ds_spec.CommEvent: timed(ds_spec.CommEvent, seq=counts, bytes_sent=counts, bytes_total=counts),
    ds_spec.SpanEvent: timed(ds_spec.SpanEvent),
    ds_spec.MemoryEvent: structs(ds_spec.MemoryEvent, bytes_held=counts, time_s=times, rank=counts),
    ds_spec.IoEvent: timed(ds_spec.IoEvent, num_bytes=counts),
    ds_spec.CostItem: items,
    ds_spec.Finding: findings,
    ds_spec.CostReport: structs(
        ds_spec.CostReport,
        source=st.sampled_from(["planned", "measured"]),
        items=st.lists(items, unique_by=lambda item: item.name, max_size=3).map(tuple),
        limit_s=times,
        limit_bytes=counts,
        findings=st.lists(findings, max_size=3).map(tuple),
    ),
}


@pytest.mark.parametrize("kind", KINDS, ids=lambda kind: kind.__name__)
@given(data=st.data())
def test_decoding_an_encoded_contract_gives_it_back(kind, data):
    spec = data.draw(SPECS[kind])
    assert ds_spec.decode_json(ds_spec.encode_json(spec)) == spec
    assert ds_spec.decode_json(ds_spec.encode_json(spec, indent=2).decode(), kind) == spec
    assert ds_spec.decode_msgpack(ds_spec.encode_msgpack(spec)) == spec
    assert ds_spec.decode_msgpack(ds_spec.encode_msgpack(spec), kind) == spec


@pytest.mark.parametrize("kind", KINDS, ids=lambda kind: kind.__name__)
def test_every_contract_is_frozen_strict_tagged_and_versioned(kind):
    config = kind.__struct_config__
    assert config.frozen
    assert config.forbid_unknown_fields
    assert config.tag
    assert msgspec.structs.fields(kind)[-1].name == "version"


@pytest.mark.parametrize("path", EXAMPLES, ids=lambda path: f"{path.parent.name}/{path.stem}")
def test_every_released_example_still_decodes_and_encodes_the_same(path):
    spec = ds_spec.decode_json(path.read_bytes())
    assert json.loads(ds_spec.encode_json(spec)) == json.loads(path.read_bytes())


def test_every_struct_has_an_example():
    assert {path.stem for path in EXAMPLES} == {kind.__struct_config__.tag for kind in KINDS}


def test_examples_for_a_new_release_decode_and_old_ones_are_left_alone(tmp_path):
    write_examples = runpy.run_path(str(FOLDER / "write_examples.py"))["write_examples"]
    written = write_examples(tmp_path)
    assert {type(ds_spec.decode_json(path.read_bytes())) for path in written} == set(KINDS)
    written[0].write_text("as it was")
    assert write_examples(tmp_path) == []
    assert written[0].read_text() == "as it was"


@pytest.mark.parametrize("path", EXAMPLES, ids=lambda path: path.stem)
def test_an_unknown_field_and_a_wrong_type_are_refused(path):
    raw = json.loads(path.read_bytes())
    with pytest.raises(msgspec.ValidationError, match="unknown field `surprise`"):
        ds_spec.decode_json(json.dumps(raw | {"surprise": 1}))
    with pytest.raises(msgspec.ValidationError):
        ds_spec.decode_json(json.dumps(raw | {"version": "one"}))


@pytest.mark.parametrize("path", EXAMPLES, ids=lambda path: path.stem)
def test_a_version_that_is_not_known_is_refused(path):
    raw = json.loads(path.read_bytes())
    with pytest.raises(msgspec.ValidationError, match=r"version must be 1, got 2; .* newer"):
        ds_spec.decode_json(json.dumps(raw | {"version": 2}))


@pytest.mark.parametrize("data", [b"", b"{", b"[]", b"3", b'{"type": "nonsense"}', b"\xff\xff"])
def test_what_is_no_contract_is_refused(data):
    with pytest.raises(msgspec.DecodeError):
        ds_spec.decode_json(data)
    with pytest.raises(msgspec.DecodeError):
        ds_spec.decode_msgpack(data)


@pytest.mark.parametrize("path", EXAMPLES, ids=lambda path: path.stem)
def test_a_truncated_file_is_refused(path):
    spec = ds_spec.decode_json(path.read_bytes())
    for encoded, decode in (
        (ds_spec.encode_json(spec), ds_spec.decode_json),
        (ds_spec.encode_msgpack(spec), ds_spec.decode_msgpack),
    ):
        for end in range(0, len(encoded), 7):
            with pytest.raises(msgspec.DecodeError):
                decode(encoded[:end])


NONSENSE = [
    ("tensor", {"shape": [-1]}, r"sizes of '.*' must not be negative, got shape \(-1,\)"),
    ("tensor", {"name": ""}, "name must not be empty"),
    ("shard_piece", {"numel": -1}, "ShardPiece.numel must not be negative, got -1"),
    ("shard_layout", {"world_size": 0}, "world_size must be at least 1, got 0"),
    ("comm_event", {"bytes_sent": -5}, "CommEvent.bytes_sent must not be negative, got -5"),
    ("comm_event", {"begin_s": 9e9}, "CommEvent must not end before it begins"),
    ("span_event", {"end_s": -1.0}, "SpanEvent must not end before it begins"),
    ("io_event", {"num_bytes": -1}, "IoEvent.num_bytes must not be negative"),
    ("memory_event", {"rank": -1}, "MemoryEvent.rank must not be negative"),
    ("cost_item", {"compute_flops": -1}, "CostItem.compute_flops must not be negative"),
    ("cost_report", {"source": "guessed"}, "must be 'planned' or 'measured', got 'guessed'"),
    ("finding", {"gain_bytes": -1}, "Finding.gain_bytes must not be negative"),
]


@pytest.mark.parametrize(("tag", "change", "message"), NONSENSE)
def test_nonsense_is_refused_with_its_field(tag, change, message):
    (path,) = [path for path in EXAMPLES if path.stem == tag][-1:]
    raw = json.loads(path.read_bytes())
    with pytest.raises(msgspec.ValidationError, match=message):
        ds_spec.decode_json(json.dumps(raw | change))
    with pytest.raises((ValueError, TypeError), match=message):
        msgspec.structs.replace(ds_spec.decode_json(json.dumps(raw)), **_tuples(change))


def _tuples(change):
    return {name: tuple(value) if isinstance(value, list) else value for name, value in change.items()}


def test_times_that_json_cannot_say_and_counts_that_are_not_whole_are_refused():
    with pytest.raises(ValueError, match=r"MemoryEvent.time_s must be finite, got nan"):
        ds_spec.MemoryEvent(component="parameters", bytes_held=3, time_s=float("nan"), rank=0)
    with pytest.raises(TypeError, match=r"MemoryEvent.bytes_held must be an int, got 3.0"):
        ds_spec.MemoryEvent(component="parameters", bytes_held=3.0, time_s=0.5, rank=0)
    with pytest.raises(TypeError, match=r"the size of mesh axis 'dp' must be an int, got 2.0"):
        ds_spec.MeshSpec(axes=("dp",), sizes=(2.0,))


def test_a_report_adds_up_its_components_and_refuses_one_twice():
    item = ds_spec.CostItem(name="parameters", bytes_held=5)
    other = ds_spec.CostItem(name="gradients", bytes_held=7)
    assert ds_spec.CostReport(source="planned", items=(item, other)).bytes_held == 12
    with pytest.raises(ValueError, match=r"one item per component, got \['parameters'\] twice"):
        ds_spec.CostReport(source="planned", items=(item, item))


@given(meshes)
def test_ranks_and_coordinates_are_one_to_one(mesh):
    coordinates = [mesh.coordinate(rank) for rank in range(mesh.world_size)]
    assert [mesh.rank(coordinate) for coordinate in coordinates] == list(range(mesh.world_size))


@given(meshes)
def test_the_peers_along_an_axis_split_the_mesh(mesh):
    for axis in mesh.axes:
        groups = {mesh.peers(rank, axis) for rank in range(mesh.world_size)}
        assert sorted(rank for group in groups for rank in group) == list(range(mesh.world_size))
        assert {len(group) for group in groups} == {mesh.size(axis)}


@pytest.mark.parametrize(
    ("axes", "sizes", "message"),
    [
        (("xp",), (2,), "mesh axes must be among"),
        (("dp", "dp"), (2, 2), "mesh axes must differ"),
        (("dp",), (2, 2), "one size per axis"),
        (("dp", "tp"), (2, 0), "size of mesh axis 'tp' must be at least 1, got 0; leave out"),
        (("dp",), (-3,), "at least 1, got -3"),
    ],
)
def test_meshes_that_make_no_sense_are_refused(axes, sizes, message):
    with pytest.raises(ValueError, match=message):
        ds_spec.MeshSpec(axes=axes, sizes=sizes)


def test_ranks_outside_the_mesh_are_refused():
    mesh = ds_spec.MeshSpec(axes=("dp",), sizes=(2,))
    with pytest.raises(ValueError, match=r"rank must be in 0\.\.1, got 2"):
        mesh.coordinate(2)
    with pytest.raises(ValueError, match=r"dp must be in 0\.\.1, got 5"):
        mesh.rank({"dp": 5})
    assert mesh.size("tp") == 1
    assert mesh.peers(1, "tp") == (1,)


def test_a_layout_refuses_pieces_of_nothing():
    piece = ds_spec.ShardPiece(tensor="w", rank=0, start_numel=0, numel=1, buffer="b", buffer_start_numel=0)
    tensor = ds_spec.TensorSpec(name="w", shape=(1,), dtype="float32")
    layout = ds_spec.ShardLayout(world_size=1, tensors=(tensor,), pieces=(piece,))
    assert layout.on_rank(0) == (piece,)
    with pytest.raises(ValueError, match="does not list"):
        ds_spec.ShardLayout(world_size=1, tensors=(), pieces=(piece,))
    with pytest.raises(ValueError, match="at least 1, got 0"):
        ds_spec.ShardLayout(world_size=0, tensors=(tensor,), pieces=(piece,))
    moved, padded = (msgspec.structs.replace(piece, **{name: 3}) for name in ("rank", "start_numel"))
    with pytest.raises(ValueError, match="is on rank 3 of 2"):
        ds_spec.ShardLayout(world_size=2, tensors=(tensor,), pieces=(moved,))
    with pytest.raises(
        ValueError, match="must end within its 1 elements, got 1 from 3 on; leave padding out"
    ):
        ds_spec.ShardLayout(world_size=1, tensors=(tensor,), pieces=(padded,))
    with pytest.raises(ValueError, match="must have different names"):
        ds_spec.ShardLayout(world_size=1, tensors=(tensor, tensor), pieces=(piece,))


def test_the_schema_names_every_struct():
    assert set(ds_spec.json_schema()["$defs"]) == {kind.__name__ for kind in KINDS}


@pytest.mark.parametrize("path", EXAMPLES, ids=lambda path: path.stem)
def test_the_schema_accepts_the_examples_and_refuses_unknown_fields(path):
    validator = jsonschema.Draft202012Validator(ds_spec.json_schema())
    raw = json.loads(path.read_bytes())
    validator.validate(raw)
    assert not validator.is_valid(raw | {"surprise": 1})
