"""A full disk or a read-only folder costs nothing that was saved, and leaves nothing half."""

import errno
import json
import os
import resource
import subprocess
from contextlib import contextmanager

import pytest

from deqkit.train.checkpoint import list_checkpoints
from train.runs import assert_same_run, assert_same_tensors, everything, latest, run, tensors_of, tiny


@pytest.fixture(scope="module")
def undisturbed(corpus, tmp_path_factory):
    path = tmp_path_factory.mktemp("undisturbed") / "run"
    run(everything(corpus), path)
    return path


@pytest.fixture
def begun(corpus, tmp_path):
    """A run of three steps, to go on with."""
    run(everything(corpus), tmp_path / "run", max_steps=3)
    return tmp_path / "run"


@contextmanager
def nothing_is_lost(path):
    """What follows fails with an OSError, and the checkpoints are then as they were."""
    names = sorted(p.name for p in (path / "checkpoints").iterdir())
    before = tensors_of(latest(path))
    with pytest.raises(OSError) as caught:
        yield caught
    assert sorted(p.name for p in (path / "checkpoints").iterdir()) == names
    assert_same_tensors(tensors_of(latest(path)), before)


def mounted(folder, options):
    """Mount a file system of a chosen size, or skip where that is not allowed."""
    folder.mkdir()
    done = subprocess.run(["mount", "-t", "tmpfs", "-o", options, "none", str(folder)], capture_output=True, text=True)
    if done.returncode:
        pytest.skip(f"cannot mount: {done.stderr.strip()}")


@pytest.mark.parametrize("number", range(1, 9))
def test_no_space_at_any_file_of_a_checkpoint(undisturbed, corpus, begun, monkeypatch, number):
    fsync, calls = os.fsync, []

    def full(handle):
        calls.append(handle)
        if len(calls) == number:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        fsync(handle)

    monkeypatch.setattr(os, "fsync", full)
    with nothing_is_lost(begun) as caught:
        run(everything(corpus, checkpoint_every=1), begun, resume=True)
    assert caught.value.errno == errno.ENOSPC
    monkeypatch.undo()
    run(everything(corpus), begun, resume=True)
    assert_same_run(begun, undisturbed)


def test_files_that_may_not_grow(undisturbed, corpus, begun):
    """The limit stops safetensors in the middle of a file, as a full disk does."""
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (16 * 1024, limits[1]))
    try:
        with nothing_is_lost(begun) as caught:
            run(everything(corpus), begun, resume=True)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
    assert "safetensors" in str(caught.value)
    run(everything(corpus), begun, resume=True)
    assert_same_run(begun, undisturbed)


# TensorBoard writes in a thread of its own, which dies of a full disk before the loop hears of it.
@pytest.mark.filterwarnings("ignore::pytest.PytestUnhandledThreadExceptionWarning")
@pytest.mark.parametrize("trackers", [(), ("tensorboard",)], ids=["alone", "with-events"])
@pytest.mark.parametrize("free", [0, 8, 60])
def test_a_disk_that_is_really_full(undisturbed, corpus, tmp_path, free, trackers):
    """With `free` KiB left: not even metrics can be written, or only they, or half a checkpoint."""
    disk = tmp_path / "disk"
    mounted(disk, "size=2m")
    try:
        path = disk / "run"
        run(everything(corpus, trackers=trackers), path, max_steps=3)
        space = os.statvfs(disk)
        (disk / "filling").write_bytes(bytes(space.f_bavail * space.f_frsize - free * 1024))
        with nothing_is_lost(path):
            run(everything(corpus, trackers=trackers), path, resume=True)
        (disk / "filling").unlink()
        run(everything(corpus, trackers=trackers), path, resume=True)
        assert_same_run(path, undisturbed)
    finally:
        subprocess.run(["umount", "--lazy", str(disk)], check=True)


def test_a_read_only_folder(undisturbed, corpus, tmp_path):
    disk = tmp_path / "disk"
    mounted(disk, "size=4m")
    try:
        path = disk / "run"
        run(everything(corpus), path, max_steps=3)
        metrics = (path / "metrics.jsonl").read_bytes()
        subprocess.run(["mount", "-o", "remount,ro", str(disk)], check=True)
        with nothing_is_lost(path) as caught:
            run(everything(corpus), path, resume=True)
        assert caught.value.errno == errno.EROFS and str(path) in str(caught.value)
        with pytest.raises(OSError, match="Read-only"):
            run(everything(corpus), disk / "other")
        assert (path / "metrics.jsonl").read_bytes() == metrics
        subprocess.run(["mount", "-o", "remount,rw", str(disk)], check=True)
        assert not (disk / "other").exists()
        run(everything(corpus), path, resume=True)
        assert_same_run(path, undisturbed)
    finally:
        subprocess.run(["umount", "--lazy", str(disk)], check=True)


def test_the_first_checkpoint_does_not_fit(corpus, tmp_path, monkeypatch):
    """Then there is none, and the run begins again."""
    run(tiny(corpus), tmp_path / "whole")
    rename = os.rename

    def full_for_checkpoints(source, target):
        if "checkpoints" in str(target):
            raise OSError(errno.ENOSPC, "full")
        rename(source, target)

    monkeypatch.setattr(os, "rename", full_for_checkpoints)
    with pytest.raises(OSError, match="full"):
        run(tiny(corpus), tmp_path / "run")
    assert list_checkpoints(tmp_path / "run" / "checkpoints") == []
    assert list((tmp_path / "run" / "checkpoints").iterdir()) == []
    monkeypatch.undo()
    run(tiny(corpus), tmp_path / "run", resume=True)
    assert_same_run(tmp_path / "run", tmp_path / "whole")


def test_a_run_folder_that_cannot_be_made_is_not_left_half(corpus, tmp_path, monkeypatch):
    monkeypatch.setattr(os, "replace", lambda *_: (_ for _ in ()).throw(OSError(errno.ENOSPC, "full")))
    with pytest.raises(OSError, match="full"):
        run(tiny(corpus), tmp_path / "run")
    monkeypatch.undo()
    assert list((tmp_path / "run").iterdir()) == []
    run(tiny(corpus), tmp_path / "run")  # an empty folder is as good as none
    assert json.loads((tmp_path / "run" / "config.json").read_text())["config"]["steps"] == 6
