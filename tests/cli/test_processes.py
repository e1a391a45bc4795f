"""The entries of the processes that `serve` starts, before there is an engine in them."""

from __future__ import annotations

import json
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

PATIENCE_S = 60.0

SCRIPT = """
import sys, time
from pathlib import Path

from headrace.cli.processes import engine
from headrace.engine import main

run_engine = main.run_engine

def run_later(*arguments):
    print("importing", flush=True)
    sys.stdin.readline()
    run_engine(*arguments)

def build(config, outbox, block_key):
    print("building", flush=True)
    time.sleep(3600)

main.run_engine, main.build_served_engine = run_later, build
engine(Path(sys.argv[1]))
"""
"""`headrace engine` with its two slow parts made to last: importing the engine, until a line comes in, and building it, for good."""


@pytest.fixture
def starting(tmp_path: Path, model_folder: Path) -> Iterator[subprocess.Popen[str]]:
    config = tmp_path / "engine.json"
    config.write_text(json.dumps({"replica": "r", "address": f"unix:{tmp_path}/e.sock", "engine": {"model": str(model_folder)}}))
    pipe = subprocess.PIPE
    process = subprocess.Popen([sys.executable, "-c", SCRIPT, str(config)], stdin=pipe, stdout=pipe, stderr=pipe, text=True)
    with process:
        yield process
        process.kill()


def test_a_dump_asked_for_before_the_engine_is_ready_is_refused_in_the_log(starting: subprocess.Popen[str]) -> None:
    assert starting.stdin is not None
    assert starting.stdout is not None
    assert starting.stdout.readline() == "importing\n"
    starting.send_signal(signal.SIGUSR1)
    print(file=starting.stdin, flush=True)
    assert starting.stdout.readline() == "building\n"
    starting.send_signal(signal.SIGUSR1)
    starting.send_signal(signal.SIGTERM)
    _, log = starting.communicate(timeout=PATIENCE_S)
    assert "SIGUSR1: there are no plans to dump" in log
    assert starting.returncode == 0
