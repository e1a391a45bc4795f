"""Watches the event loop of the gateway of `bench.stream_cost`. Python's `site` reads it from PYTHONPATH; the gateway starts as people
start it.

LOOK     begin: every millisecond a timer notes how late it is and how much CPU its thread has used since the last one; and every garbage
         collection its generation and how much CPU it took
PROFILE  begin to sample stacks: at every tick of this process's CPU time, the functions on the stack of the main thread
WRITE    stop, and write both to HEADRACE_STREAM_WATCH
COUNT    write how many tasks the event loop has to HEADRACE_STREAM_WATCH with the process id appended: of each of several gateways

CPU between two looks bounds the longest slice of the event loop from above, whatever else runs on the machine; lateness does not.
"""

from __future__ import annotations

import os
import signal
import sys
from types import FrameType
from typing import Any

LOOK, PROFILE, WRITE, COUNT = (signal.SIGRTMIN + number for number in (5, 6, 7, 8))
TICK_S = 0.001
SAMPLE_S = 0.001
_looks: list[tuple[float, float]] = []
_collections: list[tuple[int, float]] = []
_stacks: dict[str, int] = {}
_is_looking = False


def _look(_number: int, _frame: FrameType | None) -> None:
    import asyncio
    import gc
    import time

    loop: Any = asyncio.events._get_running_loop()

    def tick(due: float, used: float) -> None:
        now, cpu = time.monotonic(), time.thread_time()
        _looks.append((now - due, cpu - used))
        if _is_looking:
            loop.call_later(TICK_S, tick, now + TICK_S, cpu)

    global _is_looking
    _is_looking = True
    began = 0.0

    def collected(phase: str, facts: dict[str, int]) -> None:
        nonlocal began
        if phase == "start":
            began = time.thread_time()
        else:
            _collections.append((facts["generation"], time.thread_time() - began))

    gc.callbacks.append(collected)
    loop.call_soon_threadsafe(tick, time.monotonic(), time.thread_time())


def _profile(_number: int, _frame: FrameType | None) -> None:
    signal.signal(signal.SIGPROF, _sample)
    signal.setitimer(signal.ITIMER_PROF, SAMPLE_S, SAMPLE_S)


def _sample(_number: int, frame: FrameType | None) -> None:
    names = []
    while frame is not None:
        code = frame.f_code
        names.append(f"{'/'.join(code.co_filename.split('/')[-2:])}:{code.co_qualname}")
        frame = frame.f_back
    stack = ";".join(reversed(names))
    _stacks[stack] = _stacks.get(stack, 0) + 1


def _write(_number: int, _frame: FrameType | None) -> None:
    import gc
    import json

    global _is_looking
    _is_looking = False
    gc.callbacks.clear()
    signal.setitimer(signal.ITIMER_PROF, 0)
    path = os.environ["HEADRACE_STREAM_WATCH"]
    with open(path + ".new", "w") as file:
        json.dump({"looks": _looks, "collections": _collections, "stacks": _stacks}, file)
    os.rename(path + ".new", path)
    _looks.clear()
    _stacks.clear()


def _count(_number: int, _frame: FrameType | None) -> None:
    import asyncio

    path = f"{os.environ['HEADRACE_STREAM_WATCH']}.{os.getpid()}"
    with open(path + ".new", "w") as file:
        file.write(str(len(asyncio.all_tasks(asyncio.events._get_running_loop()))))
    os.rename(path + ".new", path)


if os.environ.get("HEADRACE_STREAM_WATCH") and "gateway" in sys.argv + sys.orig_argv:
    signal.signal(LOOK, _look)
    signal.signal(PROFILE, _profile)
    signal.signal(WRITE, _write)
    signal.signal(COUNT, _count)
