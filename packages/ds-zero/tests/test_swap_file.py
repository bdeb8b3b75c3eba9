"""Swap files: room is taken at once, every byte is accounted for, every failure has a path and a way out."""

import errno
import fcntl
import logging
import multiprocessing
import os
import resource
import signal
import subprocess

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from ds_zero import SwapError
from ds_zero.swap_file import DirectAccess, SwapFile, file_name
from ds_zero.swap_store import SwapStore

pytestmark = pytest.mark.filterwarnings("ignore:.*fork.*:DeprecationWarning")
FORK = multiprocessing.get_context("fork")


@pytest.fixture(name="store")
def make_store(tmp_path):
    store = SwapStore(tmp_path, rank=0, block_bytes=8192)
    yield store
    store.close()


def file_of(store, key):
    return store.folder / file_name(key)


def test_a_file_cut_short_is_named(store):
    store.create("weights", 40_000)
    os.truncate(file_of(store, "weights"), 10_000)
    with pytest.raises(SwapError, match=r"is cut short: of 8192 bytes at 8192 only 1808 could be") as failure:
        store.read_async("weights", store.buffer(40_000, torch.uint8)).wait()
    assert str(file_of(store, "weights")) in str(failure.value)


def test_a_file_that_is_gone_is_named(store):
    store.create("weights", 4096)
    file_of(store, "weights").unlink()
    with pytest.raises(SwapError, match=r"weights\.swap: No such file .* something else has removed it"):
        store.read_async("weights", store.buffer(4096, torch.uint8)).wait()


@given(step=st.integers(1, 9000), num_bytes=st.integers(1, 20_000))
def test_transfers_cut_short_by_the_system_go_on(tmp_path_factory, step, num_bytes):
    step = max(step, num_bytes // 16)
    write, read = os.pwritev, os.preadv
    access = DirectAccess()
    access.works = False  # a step of any length is no longer aligned
    file = SwapFile(tmp_path_factory.mktemp("swap") / "x", num_bytes, access=access)
    source = torch.randint(0, 255, (num_bytes,), dtype=torch.uint8)
    target = torch.zeros_like(source)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(os, "pwritev", lambda fd, views, at: write(fd, [views[0][:step]], at))
        patch.setattr(os, "preadv", lambda fd, views, at: read(fd, [views[0][:step]], at))
        file.transfer(source.data_ptr(), 0, num_bytes, is_write=True)
        file.transfer(target.data_ptr(), 0, num_bytes, is_write=False)
    assert torch.equal(source, target)


def test_an_unbuffered_transfer_cut_short_goes_on_through_the_page_cache(store, monkeypatch):
    write = os.pwritev
    monkeypatch.setattr(os, "pwritev", lambda fd, views, at: write(fd, [bytes(views[0][:1000])], at))
    monkeypatch.setattr(DirectAccess, "refuse", lambda self, path: None)
    store.create("x", 8192)
    source = store.buffer(8192, torch.uint8).random_(0, 255)
    store.write_async("x", source).wait()
    target = store.buffer(8192, torch.uint8)
    store.read_async("x", target).wait()
    assert torch.equal(source, target)


def test_aligned_transfers_go_past_the_page_cache_and_the_rest_through_it(store, monkeypatch):
    seen = {}
    write = os.pwritev

    def spy(descriptor, views, offset):
        seen[offset] = bool(fcntl.fcntl(descriptor, fcntl.F_GETFL) & os.O_DIRECT)
        return write(descriptor, views, offset)

    monkeypatch.setattr(os, "pwritev", spy)
    store.create("x", 3 * 4096 + 10)
    store.write_async("x", store.buffer(3 * 4096 + 10, torch.uint8).zero_()).wait()
    if not store._access.works:
        pytest.skip("the file system of the temporary folder has no unbuffered access")
    assert seen == {0: True, 8192: True, 3 * 4096: False}


@pytest.mark.parametrize("at", ["open", "pwritev"])
def test_a_file_system_without_unbuffered_access_is_said_once(tmp_path, monkeypatch, caplog, at):
    caplog.set_level(logging.WARNING)
    real_open, real_write = os.open, os.pwritev

    def refuse_open(path, flags, *rest, **options):
        if flags & os.O_DIRECT:
            raise OSError(errno.EINVAL, "Invalid argument")
        return real_open(path, flags, *rest, **options)

    def refuse_write(descriptor, *rest):
        if fcntl.fcntl(descriptor, fcntl.F_GETFL) & os.O_DIRECT:
            raise OSError(errno.EINVAL, "Invalid argument")
        return real_write(descriptor, *rest)

    monkeypatch.setattr(os, at, refuse_open if at == "open" else refuse_write)
    store = SwapStore(tmp_path, rank=0, block_bytes=4096)
    for key in ("x", "y"):
        store.create(key, 65536)
        store.write_async(key, store.buffer(65536, torch.uint8).fill_(3)).wait()
        target = store.buffer(65536, torch.uint8)
        store.read_async(key, target).wait()
        assert bool((target == 3).all())
    assert [record.message.count("page cache") for record in caplog.records] == [1]
    store.close()


@pytest.mark.skipif(os.geteuid() != 0, reason="only root may mount a small file system")
def test_no_room_is_found_before_the_first_write_and_takes_none(tmp_path):
    mount = ["mount", "-t", "tmpfs", "-o", "size=1m", "none", str(tmp_path)]
    if subprocess.run(mount, check=False).returncode:
        pytest.skip("mounting is not allowed here")
    try:
        store = SwapStore(tmp_path, rank=0)
        store.create("small", 4096)
        with pytest.raises(SwapError, match=r"2097152 bytes needed, \d+ free .*; free some room") as failure:
            store.create("large", 1 << 21)
        assert str(file_of(store, "large")) in str(failure.value)
        assert not file_of(store, "large").exists()
        store.create("large", 900_000)
        store.close()
        assert not list(tmp_path.iterdir())
    finally:
        subprocess.run(["umount", str(tmp_path)], check=True)


def meet_the_limit(path, pipe):
    signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    store = SwapStore(path, rank=0)
    store.create("made before", 65536)
    resource.setrlimit(resource.RLIMIT_FSIZE, (16384, 16384))
    for act in (
        lambda: store.create("made after", 1 << 20),
        store.write_async("made before", store.buffer(65536, torch.uint8).zero_()).wait,
    ):
        try:
            act()
        except SwapError as error:
            pipe.send(str(error))
    store.close()
    pipe.close()


def test_the_file_size_limit_is_named_when_a_file_is_made_and_when_it_is_written(tmp_path):
    receiver, sender = FORK.Pipe()
    process = FORK.Process(target=meet_the_limit, args=(tmp_path, sender))
    process.start()
    sender.close()
    made, written = receiver.recv(), receiver.recv()
    process.join()
    assert "cannot make swap file" in made
    assert "cannot write 65536 bytes at 0 of swap file" in written
    for text, name in ((made, "made%20after"), (written, "made%20before")):
        assert name in text
        assert "ulimit -f" in text


@pytest.mark.parametrize(
    ("number", "advice"),
    [(errno.EIO, "the system's log"), (errno.ENOSPC, "free some room"), (errno.EBADF, "check the folder")],
)
@pytest.mark.parametrize("call", ["pwritev", "preadv"])
def test_errors_of_the_disk_have_a_path_and_a_way_out(store, monkeypatch, call, number, advice):
    def fail(*_):
        raise OSError(number, os.strerror(number))

    store.create("x", 4096)
    monkeypatch.setattr(os, call, fail)
    start = store.write_async if call == "pwritev" else store.read_async
    handle = start("x", store.buffer(4096, torch.uint8).zero_())
    for _ in range(2):  # again is the same
        with pytest.raises(SwapError, match=advice) as failure:
            handle.wait()
    assert str(file_of(store, "x")) in str(failure.value)


@given(first=st.text(), second=st.text())
def test_different_keys_have_different_names_that_stay_in_the_folder(first, second):
    assert (file_name(first) == file_name(second)) == (first == second)
    name = file_name(first)
    assert "/" not in name
    assert "\0" not in name
    assert not name.startswith(".") or first == ""
    assert len(name.encode()) <= 255
