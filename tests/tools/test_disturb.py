"""Tests that a disturbed command is stopped with all it started, goes on, and exits as it would have; nothing is left behind."""

from __future__ import annotations

import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest
from patience import PATIENCE_S, until

pytestmark = pytest.mark.process

ROOT = Path(__file__).resolve().parents[2]
TREE = """
import os, signal, subprocess, sys, time
folder, role = sys.argv[1:]
def start(role):
    return subprocess.Popen([sys.executable, __file__, folder, role])
if role == "parent":
    child, held = start("child"), start("held")
    while not os.path.exists(f"{folder}/held"):
        time.sleep(0.01)
    held.send_signal(signal.SIGSTOP)
ticks = 0
while not os.path.exists(f"{folder}/end"):
    ticks += 1
    with open(f"{folder}/new {role}", "w") as file:
        file.write(f"{os.getpid()} {ticks}")
    os.replace(f"{folder}/new {role}", f"{folder}/{role}")
    time.sleep(0.01)
if role == "parent":
    held.kill()
    held.wait()
    child.wait()
    sys.exit(7)
"""


class Tree:
    """A parent with a child, which count ticks until they are told to end, and a process that the parent itself has stopped."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.script = folder / "tree.py"
        self.script.write_text(TREE)
        self.disturb: subprocess.Popen[str] | None = None

    def start(self, *options: str) -> subprocess.Popen[str]:
        command = [sys.executable, str(ROOT / "tools" / "disturb.py"), *options, "--", sys.executable, str(self.script), str(self.folder)]
        self.disturb = subprocess.Popen([*command, "parent"], stderr=subprocess.PIPE, text=True)
        return self.disturb

    def _said(self, role: str) -> tuple[int, int]:
        until(lambda: (self.folder / role).exists())
        pid, ticks = (self.folder / role).read_text().split()
        return int(pid), int(ticks)

    def process(self, role: str) -> psutil.Process:
        return psutil.Process(self._said(role)[0])

    def wait_until_both_tick(self) -> None:
        """Parent and child, more than once from now on."""
        least = {role: self._said(role)[1] + 2 for role in ("parent", "child")}
        until(lambda: all(self._said(role)[1] >= ticks for role, ticks in least.items()))


def has_stopped(process: psutil.Process) -> bool:
    return bool(process.status() == psutil.STATUS_STOPPED)


@pytest.fixture
def tree(tmp_path: Path) -> Iterator[Tree]:
    made = Tree(tmp_path)
    yield made
    if made.disturb is not None and made.disturb.poll() is None:
        made.disturb.terminate()
        made.disturb.wait()


def test_a_command_is_stopped_with_what_it_started_and_goes_on_and_its_status_comes_through(tree: Tree) -> None:
    disturb = tree.start("--stop", "0.3-0.5", "--every", "0.3")
    both = [tree.process(role) for role in ("parent", "child")]
    held = tree.process("held")
    for _ in range(2):
        until(lambda: all(map(has_stopped, both)))
        tree.wait_until_both_tick()
        assert has_stopped(held), "its parent has stopped it, and nobody else lets it go on"
    (tree.folder / "end").touch()
    _, said = disturb.communicate(timeout=PATIENCE_S)
    assert disturb.returncode == 7
    assert "disturb: stopped " in said
    assert "disturb: stopped 0 times" not in said


def test_one_that_is_asked_to_end_leaves_nothing_behind(tree: Tree) -> None:
    disturb = tree.start("--busy", "2", "--stop", "3-4", "--every", "1")
    family = psutil.Process(disturb.pid)
    parent = tree.process("parent")
    until(lambda: has_stopped(parent))
    left = family.children(recursive=True)
    assert len(left) == 2 + 3
    disturb.send_signal(signal.SIGTERM)
    disturb.communicate(timeout=PATIENCE_S)
    assert disturb.returncode == 128 + signal.SIGTERM
    until(lambda: not any(process.is_running() for process in left))
