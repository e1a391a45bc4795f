"""Measures the longest slice of an event loop's callbacks, in CPU time of the loop's thread or in lines of Python, and what ran in it.

CPU time leaves out waiting for the GIL, of which there is little where no thread computes. The number of lines is the same on every
machine, but what C does within a line is not seen.
"""

from __future__ import annotations

import asyncio
import sys
import threading
import time
import traceback
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from types import FrameType
from typing import Any

LOOK_S = 0.002


@dataclass
class LoopWatch:
    """
    longest_s  the longest slice
    what       the callback it was
    stack      where the loop's thread was when a slice had run for LOOK_S, of the longest slice that was seen so
    """

    longest_s: float = 0.0
    what: str = ""
    stack: str = ""
    num_slices: int = 0
    _began: float = 0.0
    _seen: str = ""
    _is_over: threading.Event = field(default_factory=threading.Event)

    def run(self, handle: Any, plain: Any) -> None:
        self._began, self._seen = time.perf_counter(), ""
        cpu = time.thread_time()
        try:
            plain(handle)
        finally:
            took = time.thread_time() - cpu
            self._began = 0.0
            self.num_slices += 1
            if took > self.longest_s:
                self.longest_s, self.what, self.stack = took, repr(handle)[:300], self._seen

    def look(self, thread: int) -> None:
        while not self._is_over.wait(LOOK_S):
            began, frame = self._began, sys._current_frames().get(thread)
            if began and frame is not None and time.perf_counter() - began > LOOK_S:
                self._seen = "".join(traceback.format_stack(frame)[-12:])

    def __str__(self) -> str:
        return f"{self.longest_s * 1e3:.1f} ms in {self.what}\n{self.stack}"


@contextmanager
def watched_loop() -> Iterator[LoopWatch]:
    watch = LoopWatch()
    plain = asyncio.Handle._run
    loop_thread = threading.get_ident()

    def timed(handle: asyncio.Handle) -> None:
        if threading.get_ident() == loop_thread:
            watch.run(handle, plain)
        else:
            plain(handle)

    looker = threading.Thread(target=watch.look, args=(loop_thread,), daemon=True)
    asyncio.Handle._run = timed  # type: ignore[method-assign,assignment]
    looker.start()
    try:
        yield watch
    finally:
        watch._is_over.set()
        asyncio.Handle._run = plain  # type: ignore[method-assign]
        looker.join()


@dataclass
class LineCount:
    """
    most  lines that one slice executed, at most
    what  the callback it was
    """

    most: int = 0
    what: str = ""
    _num_lines: int = 0

    def run(self, handle: asyncio.Handle, plain: Callable[[asyncio.Handle], None]) -> None:
        self._num_lines = 0
        sys.settrace(self._note)
        try:
            plain(handle)
        finally:
            sys.settrace(None)
            if self._num_lines > self.most:
                self.most, self.what = self._num_lines, repr(handle)[:300]

    def _note(self, frame: FrameType, event: str, _: object) -> Any:
        self._num_lines += event == "line"
        return self._note


@contextmanager
def counted_lines(is_left_out: Callable[[object], bool]) -> Iterator[LineCount]:
    """Count the lines of this thread's event loop while inside. is_left_out: of a callback that is no part of what is watched"""
    count = LineCount()
    plain = asyncio.Handle._run

    def counted(handle: Any) -> None:
        if is_left_out(handle._callback):
            plain(handle)
        else:
            count.run(handle, plain)

    asyncio.Handle._run = counted  # type: ignore[method-assign,assignment]
    before = sys.gettrace()
    try:
        yield count
    finally:
        asyncio.Handle._run = plain  # type: ignore[method-assign]
        sys.settrace(before)
