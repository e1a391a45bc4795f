"""Tests that a test that hangs fails and shows where it stood, and so do the processes that it started."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from tests.house.reader import ROOT

pytestmark = pytest.mark.process

HANGING = '''
import itertools, subprocess, sys, threading
import pytest

pytestmark = pytest.mark.process

CHILD = """
import time
def wait_in_child():
    print("ready", flush=True)
    time.sleep(600)
wait_in_child()
"""

def wait_in_thread(event):
    event.wait()

def test_waits_for_a_child(tmp_path):
    with open(tmp_path / "err", "w") as err:
        child = subprocess.Popen([sys.executable, "-c", CHILD], stdout=subprocess.PIPE, stderr=err)
    child.stdout.readline()
    threading.Thread(target=wait_in_thread, args=[threading.Event()], daemon=True).start()
    child.wait()

def test_the_next_one_runs():
    pass

def test_cannot_be_interrupted():
    sum(itertools.repeat(0))  # stays in C: no signal handler of Python's runs
'''


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    text = (ROOT / "tests" / "conftest.py").read_text()
    (tmp_path / "conftest.py").write_text(text.replace("GRACE_S = 60", "GRACE_S = 1"))
    (tmp_path / "test_hanging.py").write_text(HANGING)
    return tmp_path


def run(folder: Path, test: str) -> subprocess.CompletedProcess[str]:
    settings = ["-c", str(ROOT / "pyproject.toml"), "-o", f"pythonpath={ROOT} {ROOT / 'tests' / 'support'}", "-o", "timeout=5"]
    options = ["-p", "no:cacheprovider", "--rootdir", str(folder), *settings, "-k", test]
    return subprocess.run([sys.executable, "-m", "pytest", "-q", *options, str(folder)], capture_output=True, text=True, timeout=120)


def test_a_hanging_test_fails_with_the_stacks_of_its_threads_and_children(folder: Path) -> None:
    done = run(folder, "test_waits_for_a_child or test_the_next_one_runs")
    shown = done.stdout + done.stderr
    assert done.returncode == 1, shown
    assert "1 failed, 1 passed" in shown
    assert "Timeout (>5.0s) from pytest-timeout" in shown
    for stack in ("child.wait()", "in wait_in_thread", "in wait_in_child", "stacks of process"):
        assert stack in shown, stack


def test_a_call_into_c_that_never_returns_ends_the_run_with_its_stack(folder: Path) -> None:
    done = run(folder, "test_cannot_be_interrupted")
    assert done.returncode == 1
    assert "in test_cannot_be_interrupted" in done.stderr


def test_every_test_has_a_limit(request: pytest.FixtureRequest) -> None:
    assert float(request.config.getini("timeout")) > 0
