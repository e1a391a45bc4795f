"""A cache of compiled kernels on disk: Numba's cache with three changes.

Disk errors are not fatal: a kernel that cannot be read is compiled again, one that cannot be written is used from memory. Numba's own cache
would end the process.

Numba takes the number of a new code file from the index, so two replicas could write two signatures to one file and later run the wrong
code.

Only one private folder is used: cached kernels are pickled machine code, so write access to it is enough to run code as this user
(`machine.cache_folder`). There is one folder per (kernel sources, numba, llvmlite, Python, CPU): Numba itself notices a changed file but
not a changed helper in another file.
"""

from __future__ import annotations

import fcntl
import hashlib
import logging
import os
import platform
import sys
import time
import uuid
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager, nullcontext, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from numba.core.caching import CompileResultCacheImpl, FunctionCache, IndexDataCacheFile, UserProvidedCacheLocator
from numba.core.ccallback import CFunc
from numba.core.event import Event, Listener, install_listener, trigger_event

from headrace.machine.cache_folder import ENVIRONMENT, cache_root, open_private

log = logging.getLogger(__name__)

KERNEL_SOURCES = Path(__file__).parents[2]
MAX_WAIT_S = 60.0
POLL_S = 0.05
COMPILE = "numba:compile"
"""Numba's event around each compilation, nested ones included. Numba does not trigger it for C functions; `KeptCFunc` does."""


@dataclass(frozen=True, slots=True)
class CompileCache:
    """directory: None: kernels are compiled in memory only."""

    directory: Path | None
    reason: str


def code_key(sources: Path, cpu: str) -> str:
    digest = hashlib.sha256(cpu.encode())
    for path in sorted(sources.rglob("*.py")):
        digest.update(str(path.relative_to(sources)).encode() + b"\0" + path.read_bytes() + b"\0")
    for text in (sys.version, platform.machine(), *_versions()):
        digest.update(text.encode() + b"\0")
    return f"{cpu.partition(' ')[0]}-{digest.hexdigest()[:16]}"


def _versions() -> tuple[str, str]:
    import llvmlite
    import numba

    return numba.__version__, llvmlite.__version__


def _host_cpu() -> str:
    import llvmlite.binding
    from numba import config

    features = config.CPU_FEATURES or llvmlite.binding.get_host_cpu_features().flatten()
    return f"{config.CPU_NAME or llvmlite.binding.get_host_cpu_name()} {features}"


def choose_cache(root: Path, key: str) -> CompileCache:
    try:
        directory = open_private(root, ("numba", key))
    except OSError as error:
        return CompileCache(None, f"kernels are compiled at every start: {error}; set {ENVIRONMENT} to a private folder")
    return CompileCache(directory, f"compiled kernels are kept in {directory}")


def numba_cache() -> CompileCache:
    return choose_cache(cache_root(os.environ), code_key(KERNEL_SOURCES, _host_cpu()))


class Disk:
    """refusal: why this process stopped writing to the cache; None while writing works."""

    def __init__(self) -> None:
        self.refusal: str | None = None

    def refuse(self, error: OSError, folder: str) -> None:
        if self.refusal is None:
            self.refusal = f"compiled kernels cannot be kept in {folder} ({error.strerror or error})"
            log.warning("%s; every start compiles them again. Free space there, or set %s to another folder.", self.refusal, ENVIRONMENT)


DISK = Disk()


class _Locator(UserProvidedCacheLocator):
    def ensure_cache_path(self) -> None:
        os.makedirs(self.get_cache_path(), exist_ok=True)

    @classmethod
    def from_function(cls, py_func: Any, py_file: str) -> _Locator:
        return cls(py_func, py_file)


class _Files(CompileResultCacheImpl):
    _locator_classes = (_Locator,)


class DataFiles(IndexDataCacheFile):
    """An index, and one code file per signature under a random name, which no other process takes.

    When two processes write the index at once, one of the new entries is lost and compiled again at the next start.
    """

    def save(self, key: Any, data: Any) -> None:
        name = self._data_name_pattern.format(number=uuid.uuid4().int)
        self._save_data(name, data)
        self._save_index({**self._load_index(), key: name})


class KernelCache(FunctionCache):
    """Loading and saving raise no OSError."""

    cache_path: str

    _impl_class = _Files
    disk = DISK

    def __init__(self, py_func: Any) -> None:
        super().__init__(py_func)
        self._cache_file = DataFiles(self._cache_path, self._impl.filename_base, self._impl.locator.get_source_stamp())

    def load_overload(self, sig: Any, target_context: Any) -> Any:
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
    dispatcher._cache = KernelCache(dispatcher.py_func)


@contextmanager
def only_here(lock: Path) -> Iterator[None]:
    """Another process that is inside is waited for, up to MAX_WAIT_S. Then this one goes on, as where the disk has no locks."""
    with ExitStack() as stack:
        with suppress(OSError):
            lock.parent.mkdir(mode=0o700, exist_ok=True)
            descriptor = os.open(lock, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
            stack.callback(os.close, descriptor)
            until = time.monotonic() + MAX_WAIT_S
            while not _locked(descriptor) and time.monotonic() < until:
                time.sleep(POLL_S)
        yield


def _locked(descriptor: int) -> bool:
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    return True


class KeptCFunc(CFunc):
    address: int
    _turn: Path | None = None

    def enable_caching(self) -> None:
        self._cache = KernelCache(self.__wrapped__)
        self._turn = Path(self._cache.cache_path, f"{self.__wrapped__.__name__}.lock")

    def compile(self) -> None:
        with nullcontext() if self._turn is None else only_here(self._turn):
            super().compile()

    def _compile_uncached(self) -> Any:
        numba_cfunc: Any = super()
        with trigger_event(COMPILE):
            return numba_cfunc._compile_uncached()


class _Count(Listener):
    def __init__(self, report: Callable[[int], None]) -> None:
        self._report = report
        self._num_compiled = 0

    def on_start(self, event: Event) -> None:
        if self._num_compiled == 0:
            self._report(0)

    def on_end(self, event: Event) -> None:
        self._num_compiled += 1
        self._report(self._num_compiled)


@contextmanager
def report_compiling(report: Callable[[int], None]) -> Iterator[None]:
    """Inside, `report` is called with the number of functions compiled so far, on the thread that compiles: 0 when the first begins, never
    if all come from the cache on disk."""
    with install_listener(COMPILE, _Count(report)):
        yield
