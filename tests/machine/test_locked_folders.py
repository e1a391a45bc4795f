"""Tests directories that belong to one process each: in use while it lives, however it ends."""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from headrace.machine.locked_folders import LockedFolder, is_locked, remove_unlocked

pytestmark = pytest.mark.pure

PREFIX, LOCK = "in-use-", "in-use.lock"
CHILD = """
import subprocess, sys, time
from pathlib import Path
from headrace.machine.locked_folders import LockedFolder
folder = LockedFolder.make(Path(sys.argv[1]), "in-use-", "in-use.lock")
own = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(60)"])
print(folder.path, own.pid, flush=True)
time.sleep(60)
"""


@pytest.mark.process
def test_a_folder_is_in_use_until_its_process_is_killed_and_not_longer(tmp_path: Path) -> None:
    with subprocess.Popen([sys.executable, "-c", CHILD, str(tmp_path)], stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        name, own_pid = process.stdout.readline().split()
        folder = Path(name)
        (folder / "secret").write_text("x")
        remove_unlocked(tmp_path, PREFIX, LOCK)
        assert is_locked(folder, LOCK)
        assert (folder / "secret").exists()
        process.send_signal(signal.SIGKILL)
        process.wait()
        try:
            assert not is_locked(folder, LOCK), "what it had started lives on, and does not hold the lock"
        finally:
            os.kill(int(own_pid), signal.SIGKILL)
    remove_unlocked(tmp_path, PREFIX, LOCK)
    assert list(tmp_path.iterdir()) == []


def test_what_cannot_be_locked_leaves_no_folder_and_no_descriptor(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(*_: object) -> None:
        raise OSError(28, "No space left on device")

    before = len(os.listdir("/proc/self/fd")) if Path("/proc/self/fd").exists() else 0
    monkeypatch.setattr(os, "rename", full)
    for _ in range(5):
        with pytest.raises(OSError, match="No space left"):
            LockedFolder.make(tmp_path, PREFIX, LOCK)
    assert list(tmp_path.iterdir()) == []
    assert not before or len(os.listdir("/proc/self/fd")) == before


def test_a_folder_may_be_removed_twice_and_by_way_of_a_link_it_is_in_use_too(tmp_path: Path) -> None:
    made = LockedFolder.make(tmp_path, PREFIX, LOCK)
    (made.path / "below").mkdir()
    (made.path / "elsewhere").symlink_to(tmp_path)
    link = tmp_path / "link"
    link.symlink_to(made.path)
    if os.geteuid() == 0:
        os.lchown(link, 12345, 12345)
    assert is_locked(link, LOCK)
    made.remove()
    made.remove()
    assert list(tmp_path.iterdir()) == [link]


def test_the_lock_file_is_removed_last(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A process that is killed while it removes a folder leaves one that the next process finds."""
    made = LockedFolder.make(tmp_path, PREFIX, LOCK)
    (made.path / "secret").write_text("x")
    with monkeypatch.context() as patched:
        patched.setattr(shutil, "rmtree", lambda *_, **__: None)
        made.remove()
    assert [path.name for path in made.path.iterdir()] == [LOCK]
    remove_unlocked(tmp_path, PREFIX, LOCK)
    assert list(tmp_path.iterdir()) == []
