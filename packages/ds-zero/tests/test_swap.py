"""Swap files: what is written comes back, every failure has a path, and nothing is left behind."""

import logging
import multiprocessing
import os
import resource
import signal
import subprocess
import threading
from pathlib import Path

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from ds_zero import SwapError
from ds_zero.swap_folder import SwapFolder, remove_stale
from ds_zero.swap_store import SwapStore

SIZES = st.one_of(st.integers(0, 5000), st.sampled_from([4095, 4096, 4097, 65536, 100_000]))
FORK = multiprocessing.get_context("fork")


@pytest.fixture(name="store")
def make_store(tmp_path):
    store = SwapStore(tmp_path, rank=0, block_bytes=8192)
    yield store
    store.close()


@given(
    numel=SIZES, dtype=st.sampled_from([torch.float32, torch.bfloat16, torch.uint8]), aligned=st.booleans()
)
def test_what_is_written_comes_back(tmp_path_factory, numel, dtype, aligned):
    store = SwapStore(tmp_path_factory.mktemp("swap"), rank=0, block_bytes=8192)
    source = store.buffer(numel, dtype) if aligned else torch.empty(numel + 1, dtype=dtype)[1:]
    source.copy_(torch.randint(0, 100, (numel,)))
    store.create("x", source.nbytes)
    store.write_async("x", source).wait()
    target = store.buffer(numel, dtype).fill_(101)
    handle = store.read_async("x", target)
    handle.wait()
    assert handle.done()
    assert torch.equal(source, target)
    assert (store.bytes_written, store.bytes_read) == (source.nbytes, source.nbytes)
    store.close()


def test_keys_are_any_text_and_stay_inside_the_folder(store):
    keys = ["../../etc/passwd", "/tmp/x", "blocks.0/states", "", ".", "a" * 400, "a" * 401, "ä\n"]
    for number, key in enumerate(keys):
        store.create(key, 4096)
        store.write_async(key, store.buffer(4096, torch.uint8).fill_(number)).wait()
    files = [path for path in store.folder.iterdir() if path.name != "lock"]
    assert len(files) == len(keys)
    for number, key in enumerate(keys):
        target = store.buffer(4096, torch.uint8)
        store.read_async(key, target).wait()
        assert bool((target == number).all())


def test_a_file_cut_short_is_named(store):
    store.create("weights", 40_000)
    (path,) = (path for path in store.folder.iterdir() if "weights" in path.name)
    os.truncate(path, 10_000)
    with pytest.raises(SwapError, match=r"is cut short: of .* bytes at 8192 only") as failure:
        store.read_async("weights", store.buffer(40_000, torch.uint8)).wait()
    assert str(path) in str(failure.value)


def test_wrong_tensors_are_refused(store):
    store.create("x", 4096)
    with pytest.raises(ValueError, match="needs a contiguous CPU tensor of 4096 bytes, got 8 bytes"):
        store.write_async("x", torch.zeros(2))
    with pytest.raises(ValueError, match="there is a swap file for 'x' already"):
        store.create("x", 1)


@pytest.mark.skipif(os.geteuid() != 0, reason="only root may write where it is forbidden, and mount")
def test_no_room_is_found_before_the_first_write(tmp_path):
    if subprocess.run(
        ["mount", "-t", "tmpfs", "-o", "size=1m", "none", str(tmp_path)], check=False
    ).returncode:
        pytest.skip("mounting is not allowed here")
    try:
        store = SwapStore(tmp_path, rank=0)
        store.create("small", 4096)
        with pytest.raises(SwapError, match=r"2097152 bytes needed, \d+ free .*; free some room"):
            store.create("large", 1 << 21)
        store.close()
        assert not list(tmp_path.iterdir())
    finally:
        subprocess.run(["umount", str(tmp_path)], check=True)


def write_beyond_the_limit(path, pipe):
    signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    resource.setrlimit(resource.RLIMIT_FSIZE, (8192, 8192))
    try:
        SwapStore(path, rank=0).create("x", 1 << 20)
    except SwapError as error:
        pipe.send(str(error))


def test_the_file_size_limit_is_named(tmp_path):
    receiver, sender = FORK.Pipe()
    process = FORK.Process(target=write_beyond_the_limit, args=(tmp_path, sender))
    process.start()
    assert "ulimit -f" in receiver.recv()
    process.join()


def test_a_path_that_is_no_folder_is_refused(tmp_path):
    (tmp_path / "file").write_text("")
    with pytest.raises(SwapError, match="cannot make a folder for swap files in"):
        SwapStore(tmp_path / "file", rank=0)


def hold(path, pipe):
    store = SwapStore(path, rank=0)
    store.create("x", 1 << 20)
    pipe.send(str(store.folder))
    threading.Event().wait()


def test_the_next_start_removes_what_a_killed_process_left_and_nothing_else(tmp_path):
    receiver, sender = FORK.Pipe()
    process = FORK.Process(target=hold, args=(tmp_path, sender))
    process.start()
    left = Path(receiver.recv())
    other = tmp_path / "mine"
    other.mkdir()
    living = SwapFolder(tmp_path, rank=1)
    assert left.exists()
    process.kill()
    process.join()
    assert remove_stale(tmp_path) == [left]
    assert living.path.exists()
    assert other.exists()
    living.close()
    living.close()
    assert list(tmp_path.iterdir()) == [other]


def test_a_folder_goes_with_its_store(tmp_path):
    SwapStore(tmp_path, rank=0)  # nobody holds it
    assert not list(tmp_path.iterdir())


def test_a_file_system_without_unbuffered_files_is_said(tmp_path, monkeypatch, caplog):
    caplog.set_level(logging.INFO)
    real = os.open

    def refuse(path, flags, *rest, **options):
        if flags & os.O_DIRECT:
            raise OSError(22, "Invalid argument")
        return real(path, flags, *rest, **options)

    monkeypatch.setattr(os, "open", refuse)
    store = SwapStore(tmp_path, rank=0)
    store.create("x", 8192)
    store.write_async("x", store.buffer(8192, torch.uint8).fill_(3)).wait()
    target = store.buffer(8192, torch.uint8)
    store.read_async("x", target).wait()
    assert bool((target == 3).all())
    assert "page cache" in caplog.text
    store.close()
    assert not list(tmp_path.iterdir())
