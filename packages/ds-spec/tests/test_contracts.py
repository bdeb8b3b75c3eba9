"""Contracts survive a round trip, refuse what they do not know, and old files keep decoding."""

import json
import logging
import threading
from pathlib import Path

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

import ds_spec
from ds_spec import events
from ds_spec.codec import AnySpec

EXAMPLES = sorted((Path(__file__).parent / "examples").glob("*/*.json"))
EVENT = ds_spec.MemoryEvent(component="parameters", bytes_held=3, time_s=0.5, rank=0)
meshes = st.lists(st.sampled_from(["pp", "dp", "sp", "tp", "ep"]), unique=True, max_size=4).flatmap(
    lambda axes: st.builds(
        ds_spec.MeshSpec,
        axes=st.just(tuple(axes)),
        sizes=st.tuples(*[st.integers(1, 4)] * len(axes)),
    )
)
specs = st.one_of(
    meshes,
    st.builds(
        ds_spec.TensorSpec, name=st.text(), shape=st.lists(st.integers(0, 9)).map(tuple), dtype=st.text()
    ),
    st.from_type(ds_spec.CommEvent),
    st.from_type(ds_spec.SpanEvent),
    st.from_type(ds_spec.MemoryEvent),
    st.from_type(ds_spec.IoEvent),
    st.from_type(ds_spec.Finding),
    st.from_type(ds_spec.CostItem),
)


@given(specs.filter(lambda spec: "nan" not in repr(spec) and "inf" not in repr(spec)))
def test_decoding_an_encoded_contract_gives_it_back(spec):
    if all(abs(v) < 2**63 for v in msgspec.structs.asdict(spec).values() if isinstance(v, int)):
        assert ds_spec.decode_json(ds_spec.encode_json(spec)) == spec
        assert ds_spec.decode_msgpack(ds_spec.encode_msgpack(spec)) == spec


@pytest.mark.parametrize("path", EXAMPLES, ids=lambda path: f"{path.parent.name}/{path.stem}")
def test_every_released_example_still_decodes_and_encodes_the_same(path):
    spec = ds_spec.decode_json(path.read_bytes())
    assert json.loads(ds_spec.encode_json(spec)) == json.loads(path.read_bytes())


def test_every_struct_has_an_example():
    kinds = {kind.__struct_config__.tag for kind in AnySpec.__args__}
    assert {path.stem for path in EXAMPLES} == kinds


@pytest.mark.parametrize("path", EXAMPLES, ids=lambda path: path.stem)
def test_an_unknown_field_and_a_wrong_type_are_refused(path):
    raw = json.loads(path.read_bytes())
    with pytest.raises(msgspec.ValidationError, match="unknown field `surprise`"):
        ds_spec.decode_json(json.dumps(raw | {"surprise": 1}))
    with pytest.raises(msgspec.ValidationError):
        ds_spec.decode_json(json.dumps(raw | {"version": "one"}))


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
        (("dp",), (0,), "at least 1"),
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
    with pytest.raises(ValueError, match="must not be negative"):
        ds_spec.ShardPiece(tensor="w", rank=0, start_numel=-1, numel=1, buffer="b", buffer_start_numel=0)


def test_events_reach_every_listener_until_it_closes():
    with events.collect() as outer:
        assert events.listening()
        with events.collect() as inner:
            events.emit(EVENT)
        events.emit(EVENT)
    events.emit(EVENT)
    assert (inner, outer) == ([EVENT], [EVENT, EVENT])
    assert not events.listening()


def test_a_listener_that_raises_is_reported_once_and_harms_nobody(caplog):
    def broken(event):
        raise OSError("disk full")

    with caplog.at_level(logging.ERROR), events.subscribe(broken), events.collect() as seen:
        events.emit(EVENT)
        events.emit(EVENT)
    assert seen == [EVENT, EVENT]
    assert caplog.text.count("OSError: disk full") == 1


def test_events_from_many_threads_all_arrive():
    def work():
        for _ in range(200):
            events.emit(EVENT)

    with events.collect() as seen:
        threads = [threading.Thread(target=work) for _ in range(8)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    assert len(seen) == 1600


def test_the_schema_names_every_struct():
    assert {"MeshSpec", "ShardLayout", "CommEvent"} <= set(ds_spec.json_schema()["$defs"])
