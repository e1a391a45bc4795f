"""Where Triton keeps compiled kernels, and how its progress is reported.

Write access to the folder is enough to run code as this user (`host.cache_folder`). Triton names a kernel by its source, those of the
functions that it calls, the compiler's version and the device.
"""

from __future__ import annotations

import os
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import cache

import triton

from headrace.tensor.host.cache_folder import ENVIRONMENT, cache_root, open_private


@cache
def _choose_folder() -> tuple[bool, str]:
    """Point Triton at this user's private folder, or at one that ends with the process; once for the process."""
    try:
        folder = str(open_private(cache_root(os.environ), ("triton",)))
    except OSError as error:
        temporary = tempfile.TemporaryDirectory(prefix="headrace-triton-")
        triton.knobs.cache.dir = temporary.name
        _TEMPORARY.append(temporary)
        return False, f"kernels are compiled at every start: {error}; set {ENVIRONMENT} to a private folder"
    triton.knobs.cache.dir = folder
    return True, f"compiled kernels are kept in {folder}"


_TEMPORARY: list[tempfile.TemporaryDirectory[str]] = []


class TritonCompiler:
    """Implements `KernelCompiler`. Kernels run on the device, and no thread of the host is theirs."""

    packages: tuple[str, ...] = ("triton",)
    expected: int | None = None

    def __init__(self) -> None:
        _choose_folder()

    def limit_threads(self, num_threads: int) -> str:
        return "none"

    def kept(self) -> tuple[bool, str]:
        return _choose_folder()

    @contextmanager
    def reporting(self, report: Callable[[int], None]) -> Iterator[None]:
        """Triton tells of a kernel when it is compiled, so 0 is reported with the first one."""
        num_compiled = 0

        def listen(*, cache_hit: bool, **_: object) -> None:
            nonlocal num_compiled
            if not cache_hit:
                if not num_compiled:
                    report(0)
                num_compiled += 1
                report(num_compiled)

        before, triton.knobs.compilation.listener = triton.knobs.compilation.listener, listen
        try:
            yield
        finally:
            triton.knobs.compilation.listener = before
