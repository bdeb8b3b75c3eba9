"""The swap store: what is written comes back, errors come to whoever waits, memory is safe meanwhile."""

import os
import threading
import weakref

import pytest
import torch
from hypothesis import example, given
from hypothesis import strategies as st

from ds_spec import events
from ds_zero import SwapError
from ds_zero.swap_store import SwapStore

SIZES = st.one_of(
    st.integers(0, 5000), st.sampled_from([0, 1, 511, 512, 513, 4095, 4096, 4097, 65536, 100_000])
)
DTYPES = st.sampled_from([torch.float32, torch.bfloat16, torch.float16, torch.int64, torch.uint8])


@pytest.fixture(name="store")
def make_store(tmp_path):
    store = SwapStore(tmp_path, rank=0, block_bytes=8192)
    yield store
    store.close()


@given(numel=SIZES, dtype=DTYPES, aligned=st.booleans(), num_threads=st.integers(1, 3))
@example(numel=5_000_001, dtype=torch.float32, aligned=True, num_threads=2)
def test_what_is_written_comes_back(tmp_path_factory, numel, dtype, aligned, num_threads):
    block_bytes = 8192 if numel < 1_000_000 else 1 << 20
    store = SwapStore(
        tmp_path_factory.mktemp("swap"), rank=0, block_bytes=block_bytes, num_threads=num_threads
    )
    source = store.buffer(numel, dtype) if aligned else torch.empty(numel + 1, dtype=dtype)[1:]
    source.copy_(torch.randint(0, 100, (numel,)))
    store.create("x", source.nbytes)
    with events.collect() as seen:
        store.write_async("x", source).wait()
        target = store.buffer(numel, dtype).fill_(101)
        handle = store.read_async("x", target)
        handle.wait()
    assert handle.done()
    assert torch.equal(source, target)
    assert (store.bytes_written, store.bytes_read) == (source.nbytes, source.nbytes)
    for op in ("write", "read"):
        assert sum(event.num_bytes for event in seen if event.op == op) == source.nbytes
    store.close()


def test_many_transfers_under_way_do_not_mix(store):
    sources = {}
    for number in range(20):
        key = f"blocks.{number}/states"
        sources[key] = store.buffer(30_000, torch.uint8).fill_(number)
        store.create(key, 30_000)
    for handle in [store.write_async(key, source) for key, source in sources.items()]:
        handle.wait()
    targets = {key: store.buffer(30_000, torch.uint8) for key in sources}
    for handle in [store.read_async(key, target) for key, target in targets.items()]:
        handle.wait()
    for key, source in sources.items():
        assert torch.equal(source, targets[key])


def test_keys_are_any_text_and_stay_inside_the_folder(store):
    keys = ["../../etc/passwd", "/tmp/x", "blocks.0/states", "", ".", "..", "a" * 400, "a" * 401, "ä\n\0"]
    for number, key in enumerate(keys):
        store.create(key, 4096)
        store.write_async(key, store.buffer(4096, torch.uint8).fill_(number)).wait()
    files = [path for path in store.folder.iterdir() if path.name != "lock"]
    assert len(files) == len(keys)
    assert [path.name for path in store.folder.parent.iterdir()] == [store.folder.name]
    for number, key in enumerate(keys):
        target = store.buffer(4096, torch.uint8)
        store.read_async(key, target).wait()
        assert bool((target == number).all())


def test_files_that_rest_hold_no_descriptors(store):
    before = len(os.listdir("/proc/self/fd"))
    for number in range(50):
        store.create(f"x{number}", 4096)
    assert len(os.listdir("/proc/self/fd")) == before


def test_wrong_tensors_and_keys_are_refused(store):
    store.create("x", 4096)
    with pytest.raises(ValueError, match="needs a contiguous CPU tensor of 4096 bytes, got 8 bytes"):
        store.write_async("x", torch.zeros(2))
    with pytest.raises(ValueError, match="got 4096 bytes on cpu, not contiguous"):
        store.write_async("x", torch.zeros(32, 32).t())
    with pytest.raises(ValueError, match="there is a swap file for 'x' already"):
        store.create("x", 1)
    with pytest.raises(ValueError, match=r"there is no swap file for 'y'; call create\(\) first"):
        store.read_async("y", torch.zeros(2))
    assert (store.bytes_written, store.bytes_read) == (0, 0)


@pytest.mark.parametrize("settings", [{"num_threads": 0}, {"block_bytes": 0}, {"block_bytes": 5000}])
def test_wrong_settings_are_refused(tmp_path, settings):
    with pytest.raises(ValueError, match="SwapStore needs num_threads >= 1 and block_bytes a multiple"):
        SwapStore(tmp_path, rank=0, **settings)
    assert not list(tmp_path.iterdir())


def test_a_closed_store_says_so(tmp_path):
    store = SwapStore(tmp_path, rank=0)
    store.create("x", 8)
    store.close()
    store.close()
    for use in (lambda: store.create("y", 8), lambda: store.read_async("x", torch.zeros(2))):
        with pytest.raises(ValueError, match="is closed; make a new one"):
            use()


def fail_at(offset, meanwhile=None):
    """A stand-in for ``os.pwritev`` that fails at one offset; elsewhere it calls ``meanwhile`` and writes."""
    write = os.pwritev

    def pwritev(descriptor, views, at):
        if at == offset:
            raise OSError(5, "Input/output error")
        if meanwhile is not None:
            meanwhile()
        return write(descriptor, views, at)

    return pwritev


def test_a_write_that_nobody_waited_for_fails_at_close_and_the_folder_goes_all_the_same(
    tmp_path, monkeypatch
):
    monkeypatch.setattr(os, "pwritev", fail_at(8192))
    store = SwapStore(tmp_path, rank=0, block_bytes=8192)
    store.create("x", 65536)
    store.write_async("x", store.buffer(65536, torch.uint8).zero_())
    with pytest.raises(SwapError, match="cannot write 8192 bytes at 8192 of swap file"):
        store.close()
    assert not list(tmp_path.iterdir())
    store.close()


def test_an_error_that_was_seen_does_not_come_again_at_close(tmp_path, monkeypatch):
    monkeypatch.setattr(os, "pwritev", fail_at(0))
    store = SwapStore(tmp_path, rank=0)
    store.create("x", 4096)
    with pytest.raises(SwapError):
        store.write_async("x", store.buffer(4096, torch.uint8).zero_()).wait()
    store.close()


def test_one_failed_write_leaves_the_others_alone(store, monkeypatch):
    monkeypatch.setattr(os, "pwritev", fail_at(8192))
    store.create("long", 16384)
    store.create("short", 8192)
    long = store.write_async("long", store.buffer(16384, torch.uint8).zero_())
    store.write_async("short", store.buffer(8192, torch.uint8).zero_()).wait()
    with pytest.raises(SwapError, match=r"long\.swap"):
        long.wait()


def test_when_wait_raises_no_block_is_under_way(store, monkeypatch):
    release = threading.Event()
    ended = []

    def meanwhile():
        release.wait(10)
        ended.append(True)

    monkeypatch.setattr(os, "pwritev", fail_at(0, meanwhile))
    store.create("x", 16384)
    handle = store.write_async("x", store.buffer(16384, torch.uint8).zero_())
    handle._moves[0].add_done_callback(lambda _: release.set())
    with pytest.raises(SwapError):
        handle.wait()
    assert ended == [True]
    assert handle.done()


def test_memory_lasts_until_it_is_moved_even_when_the_handle_is_dropped(tmp_path, monkeypatch):
    release = threading.Event()
    monkeypatch.setattr(os, "pwritev", fail_at(-1, lambda: release.wait(10)))
    store = SwapStore(tmp_path, rank=0, num_threads=1)
    store.create("x", 8192)
    source = store.buffer(8192, torch.uint8).fill_(7)
    alive = weakref.ref(source)
    handle = store.write_async("x", source)
    del handle, source
    assert alive() is not None
    release.set()
    target = store.buffer(8192, torch.uint8)
    store.read_async("x", target).wait()  # after the write, in the same thread
    assert alive() is None
    assert bool((target == 7).all())
    store.close()


def test_buffers_are_aligned_and_pinning_that_fails_is_said_once(store, monkeypatch, caplog):
    empty = torch.empty

    def refuse(*shape, pin_memory=False, **options):
        if pin_memory:
            raise RuntimeError("cannot lock memory")
        return empty(*shape, **options)

    store._pins = True
    monkeypatch.setattr(torch, "empty", refuse)
    for numel in (0, 1, 1000, 100_000):
        buffer = store.buffer(numel, torch.float32)
        assert buffer.shape == (numel,)
        assert numel == 0 or buffer.data_ptr() % 4096 == 0
    assert [record.message.count("cannot lock memory") for record in caplog.records] == [1]


def test_buffers_outlive_the_store_and_share_nothing(tmp_path):
    store = SwapStore(tmp_path, rank=0)
    first, second = (store.buffer(1_000_003, torch.float32).fill_(value) for value in (1, 2))
    part = first[-5:]
    store.close()
    del first, store
    second.fill_(3)
    assert part.tolist() == [1.0] * 5
