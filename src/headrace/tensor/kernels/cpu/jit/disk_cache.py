"""Numba's cache on disk, changed so that a full or read-only disk does not prevent a start, and that processes may fill it at once.

Numba raises every OSError, so such a disk would end the process at its first kernel. Here a file that cannot be read is compiled again,
and code that cannot be written is used from memory: with one warning, after which nothing more is written. Only the folder of
`compile_cache` is used: Numba by itself would try other folders, whose owner and mode are unchecked.

Numba also numbers a function's data files by what the index names, and writes the index before the data. Two replicas that compile at
once could then write two signatures to one file, and run the code of the wrong one. See `DataFiles`.
"""

from __future__ import annotations

import logging
import os
import uuid
from typing import Any

from numba.core.caching import CompileResultCacheImpl, FunctionCache, IndexDataCacheFile, UserProvidedCacheLocator
from numba.core.ccallback import CFunc
from numba.core.event import trigger_event

from headrace.tensor.host.cache_folder import ENVIRONMENT
from headrace.tensor.kernels.cpu.jit.progress import COMPILE

log = logging.getLogger(__name__)


class Disk:
    """The state of the cache's disk in this process. refusal: why nothing is written any more; None while writing works."""

    def __init__(self) -> None:
        self.refusal: str | None = None

    def refuse(self, error: OSError, folder: str) -> None:
        """Log the first error and write nothing more: every kernel would fail alike, after the time to serialize it."""
        if self.refusal is None:
            self.refusal = f"compiled kernels cannot be kept in {folder} ({error.strerror or error})"
            log.warning("%s; every start compiles them again. Free space there, or set %s to another folder.", self.refusal, ENVIRONMENT)


DISK = Disk()


class _Locator(UserProvidedCacheLocator):
    """The configured folder, which may be read-only."""

    def ensure_cache_path(self) -> None:
        os.makedirs(self.get_cache_path(), exist_ok=True)

    @classmethod
    def from_function(cls, py_func: Any, py_file: str) -> _Locator:
        return cls(py_func, py_file)


class _Files(CompileResultCacheImpl):
    _locator_classes = (_Locator,)


class DataFiles(IndexDataCacheFile):
    """The files of one function: an index, and one file of code per signature, written once under a name that no other process takes.

    Of two processes that write the index at once, one loses its entry, and compiles that signature again at its next start.
    """

    def save(self, key: Any, data: Any) -> None:
        name = self._data_name_pattern.format(number=uuid.uuid4().int)
        self._save_data(name, data)
        self._save_index({**self._load_index(), key: name})


class KernelCache(FunctionCache):
    """The cache of one function. Neither reading nor writing raises OSError."""

    cache_path: str

    _impl_class = _Files
    disk = DISK

    def __init__(self, py_func: Any) -> None:
        super().__init__(py_func)
        self._cache_file = DataFiles(self._cache_path, self._impl.filename_base, self._impl.locator.get_source_stamp())

    def load_overload(self, sig: Any, target_context: Any) -> Any:
        """The compiled function; None where none can be read."""
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
    """Give a decorated function this cache, as `njit(cache=True)` gives it Numba's."""
    dispatcher._cache = KernelCache(dispatcher.py_func)


class KeptCFunc(CFunc):
    """A C function as `cfunc(cache=True)` makes it, with this cache."""

    address: int
    """Address of the code; set by `compile`."""

    def enable_caching(self) -> None:
        self._cache = KernelCache(self.__wrapped__)

    def _compile_uncached(self) -> Any:
        numba_cfunc: Any = super()
        with trigger_event(COMPILE):
            return numba_cfunc._compile_uncached()
