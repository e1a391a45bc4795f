"""Numba's cache on disk, made so that a disk that refuses does not stop a start.

Numba raises what the file system raises, so a full or read-only disk would end the process at its first kernel. Here what cannot be read
is compiled, and what cannot be written is used from memory: with one warning, after which nothing more is offered to that disk. Only the
folder of `compile_cache` is used: Numba alone would go on to folders that nobody has checked.
"""

from __future__ import annotations

import logging
import os
from typing import Any

from numba.core.caching import CompileResultCacheImpl, FunctionCache, UserProvidedCacheLocator
from numba.core.ccallback import CFunc
from numba.core.event import trigger_event

from headrace.tensor.host.cache_folder import ENVIRONMENT
from headrace.tensor.kernels.cpu.jit.progress import COMPILE

log = logging.getLogger(__name__)


class Disk:
    """What this process has seen of the cache's disk. refusal: why nothing is written any more; None while it works."""

    def __init__(self) -> None:
        self.refusal: str | None = None

    def refuse(self, error: OSError, folder: str) -> None:
        """Told once: every kernel would fail in the same way, after the time to serialize it."""
        if self.refusal is None:
            self.refusal = f"compiled kernels cannot be kept in {folder} ({error.strerror or error})"
            log.warning("%s; every start compiles them again. Free space there, or set %s to another folder.", self.refusal, ENVIRONMENT)


DISK = Disk()


class _Locator(UserProvidedCacheLocator):
    """The configured folder, which may be one that can only be read."""

    def ensure_cache_path(self) -> None:
        os.makedirs(self.get_cache_path(), exist_ok=True)

    @classmethod
    def from_function(cls, py_func: Any, py_file: str) -> _Locator:
        return cls(py_func, py_file)


class _Files(CompileResultCacheImpl):
    _locator_classes = (_Locator,)


class KernelCache(FunctionCache):
    """The cache of one function. Neither reading nor writing raises OSError."""

    cache_path: str

    _impl_class = _Files
    disk = DISK

    def load_overload(self, sig: Any, target_context: Any) -> Any:
        """The compiled function; None where there is none that can be read."""
        try:
            return super().load_overload(sig, target_context)
        except (OSError, EOFError) as error:
            log.warning("a compiled kernel in %s cannot be read (%s); it is compiled again", self.cache_path, error)
            return None

    def save_overload(self, sig: Any, data: Any) -> None:
        if self.disk.refusal is not None:
            return
        try:
            super().save_overload(sig, data)
        except OSError as error:
            self.disk.refuse(error, self.cache_path)


def keep(dispatcher: Any) -> None:
    """What `njit(cache=True)` does for a function just decorated, with this cache."""
    dispatcher._cache = KernelCache(dispatcher.py_func)


class KeptCFunc(CFunc):
    """What `cfunc(cache=True)` makes, with this cache."""

    address: int
    """Of the code, once it is compiled."""

    def enable_caching(self) -> None:
        self._cache = KernelCache(self.__wrapped__)

    def _compile_uncached(self) -> Any:
        numba_cfunc: Any = super()
        with trigger_event(COMPILE):
            return numba_cfunc._compile_uncached()
