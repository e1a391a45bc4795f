"""Reports on server processes of tests from inside. Python's `site` reads it from PYTHONPATH; the processes start as people start them.

REPORT   write <pid>.json into HEADRACE_TEST_PROBE: asyncio tasks, Python threads, and the event loop's lag if it is measured
MEASURE  measure the event loop's lag from now on

Real-time signals, because the ordinary ones mean something to the processes themselves. Python runs signal handlers between two bytecodes
of the main thread, where the processes' event loops run.
"""

from __future__ import annotations

import os
import signal
import sys
from types import FrameType

REPORT = signal.SIGRTMIN + 3
MEASURE = signal.SIGRTMIN + 4
TICK_S = 0.01
_lags: list[float] = []


def _running_loop() -> object:
    events = sys.modules.get("asyncio.events")
    return None if events is None else events._get_running_loop()


def _report(_number: int, _frame: FrameType | None) -> None:
    import asyncio
    import json
    import threading

    loop = _running_loop()
    tasks = asyncio.all_tasks(loop) if loop is not None else set()  # type: ignore[arg-type]
    path = os.path.join(os.environ["HEADRACE_TEST_PROBE"], f"{os.getpid()}.json")
    content = {
        "tasks": sorted(task.get_name() if not task.get_name().startswith("Task-") else _coroutine(task) for task in tasks),
        "threads": sorted(thread.name for thread in threading.enumerate()),
        "lags_s": _lags,
    }
    with open(path + ".new", "w") as file:
        json.dump(content, file)
    os.rename(path + ".new", path)


def _coroutine(task: object) -> str:
    return str(getattr(task.get_coro(), "__qualname__", "?"))  # type: ignore[attr-defined]


def _measure(_number: int, _frame: FrameType | None) -> None:
    import asyncio
    import time

    async def tick() -> None:
        while True:
            due = time.monotonic() + TICK_S
            await asyncio.sleep(TICK_S)
            _lags.append(time.monotonic() - due)

    loop = _running_loop()
    _lags.clear()
    _keep.append(asyncio.ensure_future(tick(), loop=loop))  # type: ignore[call-overload]


_keep: list[object] = []
if os.environ.get("HEADRACE_TEST_PROBE"):
    signal.signal(REPORT, _report)
    signal.signal(MEASURE, _measure)
