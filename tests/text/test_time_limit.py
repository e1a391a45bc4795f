"""A block that runs too long is ended, and the thread is as good as before."""

from __future__ import annotations

import subprocess
import sys
import time
from contextlib import suppress

import pytest

from headrace.text.time_limit import TimedOut, time_limit


def loop() -> None:
    while True:
        pass


def test_a_loop_is_ended_and_the_next_block_runs() -> None:
    for _ in range(3):
        with pytest.raises(TimedOut), time_limit(0.01):
            loop()
        with time_limit(10.0):
            assert sum(range(1000)) == 499500


def test_a_block_that_swallows_its_end_leaves_nothing_behind() -> None:
    with time_limit(0.01), suppress(TimedOut):
        loop()
    until = time.monotonic() + 0.2
    while time.monotonic() < until:  # nothing is raised any more
        pass


def test_a_tracer_works_after_a_block_was_ended() -> None:
    """In CPython 3.11 a call that is traced never returned while the interpreter was told of an exception that had been taken back."""
    code = """
import sys
from headrace.text.time_limit import TimedOut, time_limit
try:
    with time_limit(0.01):
        while True:
            pass
except TimedOut:
    pass
def traced():
    return "traced"
sys.settrace(lambda frame, event, argument: None)
print(traced())
"""
    done = subprocess.run([sys.executable, "-c", code], stdout=subprocess.PIPE, text=True, check=True, timeout=60)
    assert done.stdout == "traced\n"
