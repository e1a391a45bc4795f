"""How a compiled kernel runs on several threads: the only parallel region of the package.

A kernel is a C function `void(arguments, worker, workers)` made by `compile_kernel`; `arguments` is the address of int64 numbers
(addresses, strides, counts; floats by `float_bits`). A region calls it once per worker, without the GIL. One region for all kernels
means one slow `parallel=True` compilation instead of one per kernel and element type.

Compiled code is kept on disk by Numba, in the directory of `compile_cache`. Kernels and helpers close over no other compiled function:
Numba keys its cache by the pickled closure, and a function's identity differs in every process.
"""

from __future__ import annotations

import struct
import threading
from array import array
from collections.abc import Callable, Hashable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from functools import cache
from typing import Any, TypeVar

import numba
import numpy as np
from llvmlite import ir
from numba import cfunc, njit, prange, types
from numba.extending import intrinsic
from torch import Tensor

from headrace.tensor.kernels.compile_cache import numba_cache
from headrace.tensor.kernels.simd import arrive, as_i64, at, current, decide, load, pause

CACHE = numba_cache()
numba.config.CACHE_DIR = str(CACHE.directory or "")  # read by every decorator below
# Regions cost microseconds with OpenMP, tens with the workqueue, which moreover ends the process on concurrent entry.
numba.config.THREADING_LAYER_PRIORITY = ["omp", "tbb", "workqueue"]

OPTIONS: dict[str, Any] = {"nogil": True, "cache": CACHE.directory is not None, "error_model": "numpy"}
"""Of every helper: no GIL, kept on disk, no checks for division by zero."""

_Function = TypeVar("_Function", bound=Callable[..., Any])
_Made = TypeVar("_Made")


def helper(function: _Function) -> _Function:
    """Compile a function that only compiled code calls: no entry from Python is made, which is half the time of a small one."""
    compiled: _Function = njit(no_cpython_wrapper=True, no_cfunc_wrapper=True, **OPTIONS)(function)
    return compiled


def entry(function: _Function) -> _Function:
    """Compile a function that Python calls."""
    compiled: _Function = njit(no_cfunc_wrapper=True, **OPTIONS)(function)
    return compiled


@intrinsic
def _call(_: Any, function: Any, arguments: Any, worker: Any, workers: Any) -> tuple[Any, Any]:
    """Call the C function at address `function`."""

    def emit(context: Any, builder: ir.IRBuilder, signature: Any, given: Any) -> ir.Value:
        i64 = ir.IntType(64)
        pointer = builder.inttoptr(given[0], ir.FunctionType(ir.VoidType(), [i64, i64, i64]).as_pointer())
        builder.call(pointer, given[1:])
        return context.get_dummy_value()

    return types.void(types.intp, types.intp, types.intp, types.intp), emit


@intrinsic
def float_from_bits(_: Any, bits: Any) -> tuple[Any, Any]:
    """The float32 whose bits stand in the low half of an int64 argument."""

    def emit(context: Any, builder: ir.IRBuilder, signature: Any, given: Any) -> ir.Value:
        return builder.bitcast(builder.trunc(given[0], ir.IntType(32)), ir.FloatType())

    return types.float32(types.intp), emit


def float_bits(value: float) -> int:
    """A float as an argument; rounded to float32."""
    return int(struct.unpack("<i", struct.pack("<f", value))[0])


@njit(parallel=True, **OPTIONS)
def _in_parallel(function: int, arguments: int, workers: int) -> None:
    for worker in prange(workers):
        _call(function, arguments, worker, workers)


@helper
def run_workers(function: int, arguments: int, workers: int) -> None:
    """Call `function` once per worker and wait; for compiled code. One worker runs on the calling thread, without a region."""
    if workers > 1:
        _in_parallel(function, arguments, workers)
    else:
        _call(function, arguments, 0, 1)


@entry
def _launch(function: int, arguments: int, workers: int) -> None:
    run_workers(function, arguments, workers)  # the caller holds the memory


class _Threads:
    """How many workers a region may have. Process-wide, as torch's own setting is."""

    def __init__(self) -> None:
        self.limit = int(numba.config.NUMBA_NUM_THREADS)
        self.told = threading.local()

    def tell_numba(self) -> None:
        """Numba keeps the size of a region per calling thread; tell it once per thread and limit."""
        if getattr(self.told, "limit", None) != self.limit:
            numba.set_num_threads(self.limit)
            self.told.limit = self.limit


_THREADS = _Threads()
_REGION = threading.RLock()
_COMPILED: list[Any] = []  # Numba frees a function's code with its object; addresses handed out must stay valid


def thread_limit() -> int:
    return _THREADS.limit


def set_thread_limit(limit: int) -> int:
    """Workers per region from now on, at most the threads Numba was started with. Returns what was set."""
    _THREADS.limit = max(1, min(limit, int(numba.config.NUMBA_NUM_THREADS)))
    return _THREADS.limit


@cache
def threading_layer() -> str:
    """Numba's threading layer ("omp", "tbb", "workqueue"), woken by an empty region if it was not.

    Must precede every call of compiled code that contains `run_workers`: such code, loaded from the disk cache, does not resolve the
    layer's symbols by itself when the region had come from that cache while it was compiled (numba 0.68), and would jump to address 0.
    """
    _in_parallel(0, 0, 0)
    return str(numba.threading_layer())


def compile_kernel(function: Callable[[int, int, int], None]) -> int:
    """Address of the compiled kernel. Compiles now, or loads it from the cache on disk. The code lives as long as the process."""
    threading_layer()
    compiled = cfunc(types.void(types.intp, types.intp, types.intp), **OPTIONS)(function)
    _COMPILED.append(compiled)
    address: int = compiled.address
    return address


def guarded(function: Callable[..., None], *arguments: Any) -> None:
    """Call compiled code that contains a region. Where the layer ends the process on concurrent entry, callers take turns."""
    _THREADS.tell_numba()
    if threading_layer() == "workqueue":
        with _REGION:
            function(*arguments)
    else:
        function(*arguments)


def words(values: Iterable[int]) -> array[int]:
    """int64 numbers in memory. Of the standard library: NumPy takes five times as long to make one and to say where it lies."""
    return array("q", values)


def with_counter(arguments: Sequence[int], place: int) -> array[int]:
    """`arguments` with a zero behind them, whose address stands at `place`: what `take_ticket` counts with."""
    memory = words((*arguments, 0))
    memory[place] = address_of(memory) + 8 * len(arguments)
    return memory


def address_of(memory: array[int]) -> int:
    return memory.buffer_info()[0]


def launch(kernel: int, arguments: Sequence[int] | array[int], workers: int, *touched: Tensor | np.ndarray) -> None:
    """Run `kernel` on `workers` threads and wait; inside `together`, put it on the list instead.

    touched: everything behind the addresses, kept until the kernel has run.
    """
    memory = arguments if isinstance(arguments, array) else words(arguments)
    pending = getattr(_CALLER, "pending", None)
    if pending is None:
        guarded(_launch, kernel, address_of(memory), workers)
    else:
        pending.add(kernel, memory, workers, touched)


# --- several kernels in one region ---

SPINS_TO_MEET = 1 << 16
"""Waiting rounds, of some 50 ns and more, after which a worker no longer expects the others."""
SPINS_BEFORE_YIELD = 1 << 12
MOST_KEPT_BYTES = 16 << 20
"""Of the memory that a list holds before it is run."""
_CALLER = threading.local()
_yield = types.ExternalFunction("sched_yield", types.int32())


@helper
def wait_until(counter: Any, value: int) -> None:
    """Until counter[0] >= value. The processor is left to others now and then: a worker that waits may hold up the one it waits for."""
    spins = 0
    while current(counter) < value:
        pause()
        spins += 1
        if spins % SPINS_BEFORE_YIELD == 0:
            _yield()


@helper
def meet(state: Any, worker: int, workers: int) -> int:
    """How many workers there are: all of them when they came together in time; else the one that gave up is alone, the others are 0."""
    arrive(state)
    spins = 0
    while current(state) < workers and current(at(state, 1)) == 0 and spins < SPINS_TO_MEET:
        pause()
        spins += 1
        if spins % SPINS_BEFORE_YIELD == 0:
            _yield()
    verdict = decide(at(state, 1), 1 if current(state) >= workers else 2 + worker)
    if verdict == 1:
        return workers
    return 1 if verdict == 2 + worker else 0


def _run_list(arguments: int, worker: int, workers: int) -> None:
    """Kernels one after the other, each worker waiting for all others in between. A list entry: kernel, arguments, workers."""
    a = as_i64(arguments)
    entries, count, state = as_i64(load(a, 0)), load(a, 1), as_i64(load(a, 2))
    team = workers if workers == 1 else meet(state, worker, workers)
    me, passed, before = (0 if team == 1 else worker), 0, 0
    if team == 0:
        return
    for index in range(count):
        own = min(load(entries, 3 * index + 2), team)
        if index > 0 and max(own, before) > 1:  # what one worker alone does in a row needs no meeting
            passed += team
            arrive(at(state, 2))
            wait_until(at(state, 2), passed)
        if me < own:
            _call(load(entries, 3 * index), load(entries, 3 * index + 1), me, own)
        before = own


class _Pending:
    """Kernels asked for and not run yet, with all they touch."""

    def __init__(self) -> None:
        self._clear()

    def _clear(self) -> None:
        self.entries: list[int] = []
        self.workers = 1
        self.kept: list[object] = []
        self.kept_bytes = 0
        self.known: dict[Hashable, object] = {}

    def add(self, kernel: int, memory: array[int], workers: int, touched: tuple[Tensor | np.ndarray, ...]) -> None:
        self.entries += (kernel, address_of(memory), workers)
        self.workers = max(self.workers, workers)
        self.kept += (memory, touched)
        self.kept_bytes += touched[0].nbytes if touched else 0
        if self.kept_bytes > MOST_KEPT_BYTES:
            self.run()

    def run(self) -> None:
        if self.entries:
            entries, state = words(self.entries), words((0, 0, 0))
            arguments = words((address_of(entries), len(entries) // 3, address_of(state)))
            guarded(_launch, _list_kernel(), address_of(arguments), self.workers)
        self._clear()


@cache
def _list_kernel() -> int:
    return compile_kernel(_run_list)


@contextmanager
def together() -> Iterator[None]:
    """Kernels launched inside run at its end, in order, in one parallel region: no thread is woken per kernel, and Python is done before
    the weights drive it out of the caches. Whoever looks at a result inside calls `settle` first. After an exception nothing is run."""
    if getattr(_CALLER, "pending", None) is not None:
        yield
        return
    _CALLER.pending = _Pending()
    try:
        yield
        _CALLER.pending.run()
    finally:
        _CALLER.pending = None


def once(key: Hashable, make: Callable[[], _Made]) -> _Made:
    """What `make` gives; inside `together`, made once per key: of tensors that nobody changes meanwhile, named by their addresses."""
    pending = getattr(_CALLER, "pending", None)
    if pending is None:
        return make()
    if key not in pending.known:
        pending.known[key] = make()
    made: _Made = pending.known[key]
    return made


def settle() -> None:
    """Run what has been asked for so far inside `together`; elsewhere nothing is ever left to do."""
    pending = getattr(_CALLER, "pending", None)
    if pending is not None:
        pending.run()
