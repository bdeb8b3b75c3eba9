"""Swap folders: private, gone with their process however it ends, and never taken from a living one."""

import fcntl
import multiprocessing
import os
import signal
import subprocess
import sys
import threading
from pathlib import Path

import pytest
import torch

from ds_zero import SwapError
from ds_zero.swap_folder import MAKING_S, SwapFolder, remove_stale
from ds_zero.swap_store import SwapStore

pytestmark = pytest.mark.filterwarnings("ignore:.*fork.*:DeprecationWarning")
FORK = multiprocessing.get_context("fork")


def write_for_ever(path, pipe):
    store = SwapStore(path, rank=0)
    store.create("x", 1 << 24)
    buffer = store.buffer(1 << 24, torch.uint8).fill_(1)
    handle = store.write_async("x", buffer)
    pipe.send(str(store.folder))
    while True:
        handle.wait()
        handle = store.write_async("x", buffer)


def test_the_next_start_removes_what_a_killed_process_left_and_nothing_else(tmp_path):
    receiver, sender = FORK.Pipe()
    process = FORK.Process(target=write_for_ever, args=(tmp_path, sender))
    process.start()
    left = Path(receiver.recv())
    other = tmp_path / "mine"
    other.mkdir()
    living = SwapFolder(tmp_path, rank=1)
    assert left.exists()
    process.kill()
    process.join()
    second = SwapFolder(tmp_path, rank=2)
    assert not left.exists()
    assert living.path.exists()
    living.close()
    living.close()
    assert second.path.exists()
    second.close()
    assert list(tmp_path.iterdir()) == [other]


def hold_with_a_child(path, pipe):
    folder = SwapFolder(path, rank=0)
    if os.fork() == 0:  # tells when it is there, so that it has been told of the fork as well
        pipe.send((str(folder.path), os.getpid()))
    threading.Event().wait()


def test_a_forked_child_does_not_keep_the_folder_of_a_dead_parent(tmp_path):
    receiver, sender = FORK.Pipe()
    process = FORK.Process(target=hold_with_a_child, args=(tmp_path, sender))
    process.start()
    left, child = receiver.recv()
    try:
        assert remove_stale(tmp_path) == []
        process.kill()
        process.join()
        assert remove_stale(tmp_path) == [Path(left)]
    finally:
        os.kill(child, signal.SIGKILL)


def use_in_a_child(store, pipe):
    try:
        store.create("y", 4096)
    except SwapError as error:
        pipe.send(str(error))
    store.close()


def test_a_forked_child_can_neither_use_nor_remove_the_store(tmp_path):
    store = SwapStore(tmp_path, rank=0)
    store.create("x", 4096)
    receiver, sender = FORK.Pipe()
    process = FORK.Process(target=use_in_a_child, args=(store, sender))
    process.start()
    assert f"belongs to process {os.getpid()}" in receiver.recv()
    process.join()
    store.write_async("x", store.buffer(4096, torch.uint8).fill_(1)).wait()
    assert remove_stale(tmp_path) == []
    store.close()
    assert not list(tmp_path.iterdir())


def test_a_process_that_ends_takes_its_folder_along(tmp_path):
    code = (
        "import sys, torch\nfrom ds_zero.swap_store import SwapStore\n"
        "store = SwapStore(sys.argv[1], rank=0)\nstore.create('x', 1 << 20)\n"
        "store.write_async('x', store.buffer(1 << 20, torch.uint8).fill_(1))\nraise SystemExit(3)\n"
    )
    done = subprocess.run([sys.executable, "-c", code, str(tmp_path)], capture_output=True, check=False)
    assert done.returncode == 3
    assert not list(tmp_path.iterdir())


def test_a_folder_goes_with_its_store(tmp_path):
    SwapStore(tmp_path, rank=0)  # nobody holds it
    assert not list(tmp_path.iterdir())


def test_a_folder_that_is_just_being_made_is_left_alone(tmp_path, monkeypatch):
    real = fcntl.flock
    removed = []

    def flock(descriptor, operation):
        monkeypatch.setattr(fcntl, "flock", real)
        removed.append(remove_stale(tmp_path))  # as another rank does that starts at the same moment
        real(descriptor, operation)

    monkeypatch.setattr(fcntl, "flock", flock)
    folder = SwapFolder(tmp_path, rank=0)
    assert removed == [[]]
    assert remove_stale(tmp_path) == []
    folder.close()


def test_a_folder_whose_making_was_cut_off_is_removed_when_it_is_old(tmp_path):
    young, old = tmp_path / "ds-zero-swap-1-0-aaaa", tmp_path / "ds-zero-swap-2-0-bbbb"
    young.mkdir()
    old.mkdir()
    os.utime(old, (0, os.stat(old).st_mtime - 2 * MAKING_S))
    assert remove_stale(tmp_path) == [old]
    assert young.exists()


def test_a_lock_that_cannot_be_had_leaves_no_folder(tmp_path, monkeypatch):
    def refuse(descriptor, operation):
        raise OSError(37, "No locks available")

    monkeypatch.setattr(fcntl, "flock", refuse)
    with pytest.raises(SwapError, match="No locks available; give Offload"):
        SwapFolder(tmp_path, rank=0)
    assert not list(tmp_path.iterdir())


def test_a_path_may_be_a_link_and_relative_and_the_working_folder_may_change(tmp_path, monkeypatch):
    (tmp_path / "disk").mkdir()
    (tmp_path / "link").symlink_to("disk")
    monkeypatch.chdir(tmp_path)
    store = SwapStore("link", rank=0)
    assert store.folder.parent == tmp_path / "disk"
    monkeypatch.chdir("/")
    store.create("x", 4096)
    store.close()
    assert not list((tmp_path / "disk").iterdir())


def test_links_and_files_with_the_name_of_a_swap_folder_are_left_alone(tmp_path):
    precious = tmp_path / "precious"
    precious.mkdir()
    (precious / "lock").write_text("")
    (tmp_path / "ds-zero-swap-1-0-link").symlink_to(precious)
    (tmp_path / "ds-zero-swap-1-0-file").write_text("")
    assert remove_stale(tmp_path) == []
    assert (precious / "lock").exists()


def test_a_lock_that_is_a_link_is_not_followed(tmp_path):
    folder = tmp_path / "ds-zero-swap-1-0-aaaa"
    folder.mkdir()
    (tmp_path / "target").write_text("")
    (folder / "lock").symlink_to(tmp_path / "target")
    assert remove_stale(tmp_path) == []
    assert folder.exists()


def test_stores_side_by_side_do_not_meet(tmp_path):
    first, second = SwapStore(tmp_path, rank=0), SwapStore(tmp_path, rank=0)
    stores = {1: first, 2: second}
    for value, store in stores.items():
        store.create("x", 4096)
        store.write_async("x", store.buffer(4096, torch.uint8).fill_(value)).wait()
    for value, store in stores.items():
        target = store.buffer(4096, torch.uint8)
        store.read_async("x", target).wait()
        assert bool((target == value).all())
    first.close()
    assert list(tmp_path.iterdir()) == [second.folder]
    second.close()


def test_a_path_that_is_no_folder_is_refused(tmp_path):
    (tmp_path / "file").write_text("")
    with pytest.raises(SwapError, match=r"cannot make a folder for swap files in .*; give Offload\(path"):
        SwapStore(tmp_path / "file", rank=0)


def start_as_a_stranger(path, pipe):
    if os.geteuid() == 0:
        os.setuid(65534)
    try:
        SwapStore(path, rank=0)
    except SwapError as error:
        pipe.send(str(error))
    pipe.close()


def test_an_unwritable_folder_is_refused(tmp_path):
    tmp_path.chmod(0o500)
    receiver, sender = FORK.Pipe()
    process = FORK.Process(target=start_as_a_stranger, args=(tmp_path, sender))
    process.start()
    sender.close()
    text = receiver.recv()
    process.join()
    tmp_path.chmod(0o700)
    assert str(tmp_path) in text
    assert "Permission denied" in text
