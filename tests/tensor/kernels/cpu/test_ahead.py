"""Tests that a first start and the process beside it share out the kernels: none is compiled twice, and none is waited for without end."""

from __future__ import annotations

import os
import subprocess
import sys
import threading
from pathlib import Path

import pytest

pytest.importorskip("numba")

import torch

from headrace.machine.cache_folder import ENVIRONMENT
from headrace.tensor.kernels.cpu import ahead
from headrace.tensor.kernels.cpu.jit import disk_cache
from headrace.tensor.kernels.cpu.jit.disk_cache import CompileCache, only_here

BESIDE = """
import time, torch
from headrace.tensor.kernels.cpu.ahead import compiling_ahead
from headrace.tensor.kernels.cpu.attention import paged
from headrace.tensor.kernels.cpu.jit import launch
from headrace.tensor.kernels.cpu.jit.disk_cache import report_compiling
compiled = []
launch.threading_layer()
launch.set_thread_limit(2)
with compiling_ahead(torch.float32, torch.bfloat16):
    while not any(launch.CACHE.directory.rglob("*.lock")):
        time.sleep(0.05)
    with report_compiling(compiled.append):
        paged.kernel(torch.float32, torch.bfloat16)
print(len(compiled), len(list(launch.CACHE.directory.rglob("paged._attend_f32_bf16-*.nbi"))))
"""


@pytest.mark.slow
@pytest.mark.process
def test_what_the_process_beside_compiles_is_found(tmp_path: Path) -> None:
    environment = {**os.environ, ENVIRONMENT: str(tmp_path), "NUMBA_NUM_THREADS": "2"}
    done = subprocess.run([sys.executable, "-c", BESIDE], env=environment, capture_output=True, text=True, check=True)
    assert done.stdout.split() == ["0", "1"]


@pytest.mark.process
def test_the_process_beside_ends_with_its_parent_however_that_ends(tmp_path: Path) -> None:
    """It has the output of its parent, which ends once both have closed it."""
    environment = {**os.environ, ENVIRONMENT: str(tmp_path), "NUMBA_NUM_THREADS": "2"}
    left = "from headrace.tensor.kernels.cpu.jit import launch\nlaunch.threading_layer()\nlaunch.set_thread_limit(2)\n"
    left += "import os, subprocess, torch\nfrom headrace.tensor.kernels.cpu.ahead import compiling_ahead\nsubprocess.DEVNULL = None\n"
    left += "with compiling_ahead(torch.float32, torch.bfloat16):\n    os._exit(0)\n"
    subprocess.run([sys.executable, "-c", left], env=environment, capture_output=True, check=True, timeout=300)
    assert not list(tmp_path.rglob("paged.*")), "it compiled on"


@pytest.mark.pure
@pytest.mark.parametrize("why", ["no cache", "one thread", "it is there", "no such kernel"])
def test_no_process_is_started_where_it_is_of_no_use(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, why: str) -> None:
    def start(*_: object, **__: object) -> None:
        raise AssertionError("a process was started")

    monkeypatch.setattr(subprocess, "Popen", start)
    monkeypatch.setattr(ahead, "CACHE", CompileCache(None if why == "no cache" else tmp_path, ""))
    monkeypatch.setattr(ahead, "thread_limit", lambda: 1 if why == "one thread" else 2)
    if why == "it is there":
        (tmp_path / "attention").mkdir()
        (tmp_path / "attention" / "paged._attend_f32_bf16-1.py311.nbi").touch()
    with ahead.compiling_ahead(torch.float16 if why == "no such kernel" else torch.float32, torch.bfloat16):
        pass
    monkeypatch.setattr(ahead, "CACHE", CompileCache(tmp_path / "empty", ""))
    monkeypatch.setattr(ahead, "thread_limit", lambda: 2)
    with pytest.raises(AssertionError, match="a process was started"), ahead.compiling_ahead(torch.float32, torch.bfloat16):
        pass


@pytest.mark.socket
def test_one_waits_for_the_other_and_not_without_end(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    order: list[str] = []
    lock = tmp_path / "new" / "kernel.lock"

    def second() -> None:
        with only_here(lock):
            order.append("second")

    with only_here(lock):
        waiting = threading.Thread(target=second)
        waiting.start()
        monkeypatch.setattr(disk_cache, "POLL_S", 0.001)
        waiting.join(0.3)
        order.append("first")
    waiting.join()
    assert order == ["first", "second"]
    monkeypatch.setattr(disk_cache, "MAX_WAIT_S", 0.0)
    with only_here(lock), only_here(lock), only_here(tmp_path / "a" / "b" / "c.lock"):
        order.append("all the same")
    assert order[2:] == ["all the same"]
