"""Logs a start that compiles kernels: the progress, and the folder that keeps the compiled kernels.

Kernels are compiled once per machine and version, which takes about half a minute for a CPU; later starts load them. What compiles them
is a part of the backend (`tensor.kernels.KernelCompiler`).
"""

from __future__ import annotations

import logging
import time
from collections.abc import Iterator
from contextlib import contextmanager

from headrace.core.clock import Clock
from headrace.tensor.kernels import KernelCompiler

log = logging.getLogger(__name__)

LOG_INTERVAL_S = 5.0
"""Seconds between two lines of progress."""


class CompileNotice:
    """Called with the number of functions compiled so far, at each change. Logs at the first call, then every LOG_INTERVAL_S."""

    def __init__(self, kept: str, expected: int | None = None, clock: Clock = time.perf_counter) -> None:
        """kept: where compiled kernels are kept, or why they are not, in words. expected: see `KernelCompiler`."""
        self._kept, self._expected, self._clock = kept, expected, clock
        self._began_s = self._logged_s = 0.0
        self._num_compiled: int | None = None

    def __call__(self, num_compiled: int) -> None:
        now = self._clock()
        if self._num_compiled is None:
            self._began_s = self._logged_s = now
            count = "" if self._expected is None else f" about {self._expected}"
            log.info("compiling%s kernels, which takes about half a minute: %s", count, self._kept)
        elif now - self._logged_s >= LOG_INTERVAL_S:
            self._logged_s = now
            count = "" if self._expected is None else f" of about {max(self._expected, num_compiled)}"
            log.info("compiled %d%s kernels in %.0f s", num_compiled, count, now - self._began_s)
        self._num_compiled = num_compiled

    def end(self) -> None:
        if self._num_compiled is not None:
            log.info("compiled %d kernels in %.0f s", self._num_compiled, self._clock() - self._began_s)


@contextmanager
def log_compiling(compiler: KernelCompiler | None) -> Iterator[None]:
    """Log the kernels that are compiled inside the block. compiler: the backend's; None: it compiles nothing."""
    if compiler is None:
        yield
        return
    is_kept, where = compiler.kept()
    notice = CompileNotice(f"once per machine and version, {where}" if is_kept else where, compiler.expected)
    with compiler.reporting(notice):
        yield
    notice.end()
