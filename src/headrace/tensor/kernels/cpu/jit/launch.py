"""Compiles kernels and runs them on several threads, in the only parallel region of the package.

A kernel is a C function `void(arguments, worker, workers)`. `arguments` is the address of int64 words (addresses, strides, counts; floats
by `float_bits`), declared once per kernel, as a NamedTuple (`scalars.read_arguments`). A region calls the kernel once per worker, without
the GIL. One region for all kernels means one slow `parallel=True` compilation instead of one per kernel.

Kernels and helpers close over no other compiled function: Numba keys its cache by the pickled closure, and a function's identity differs in
every process.
"""

from __future__ import annotations

import struct
import threading
from array import array
from collections.abc import Callable, Iterable, Sequence
from functools import cache
from typing import Any, NamedTuple, Protocol, TypeVar

import numba
import numpy as np
import torch
from llvmlite import ir
from numba import njit, prange, types
from numba.core.sigutils import normalize_signature
from numba.extending import intrinsic
from torch import Tensor

from headrace.tensor.host.fresh_memory import POISON, is_poisoned
from headrace.tensor.kernels.cpu.jit.disk_cache import KeptCFunc, keep, numba_cache
from headrace.tensor.kernels.cpu.jit.scalars import read_arguments

CACHE = numba_cache()
numba.config.CACHE_DIR = str(CACHE.directory or "")  # read by every decorator below
# Regions cost microseconds with OpenMP, tens with the workqueue, which moreover ends the process on concurrent entry.
numba.config.THREADING_LAYER_PRIORITY = ["omp", "tbb", "workqueue"]

OPTIONS: dict[str, Any] = {"nogil": True, "error_model": "numpy"}

_memset = types.ExternalFunction("memset", types.intp(types.intp, types.int32, types.intp))

_Function = TypeVar("_Function", bound=Callable[..., Any])


def _compiled(function: _Function, **options: bool) -> _Function:
    dispatcher: _Function = njit(**options, **OPTIONS)(function)
    if CACHE.directory is not None:
        keep(dispatcher)
    return dispatcher


def helper(function: _Function) -> _Function:
    """A function that only compiled code calls gets no entry from Python, half of a small one's compile time."""
    return _compiled(function, no_cpython_wrapper=True, no_cfunc_wrapper=True)


def entry(function: _Function) -> _Function:
    return _compiled(function, no_cfunc_wrapper=True)


@intrinsic
def call(_: Any, function: Any, arguments: Any, worker: Any, workers: Any) -> tuple[Any, Any]:
    def emit(context: Any, builder: ir.IRBuilder, signature: Any, given: Any) -> ir.Value:
        i64 = ir.IntType(64)
        pointer = builder.inttoptr(given[0], ir.FunctionType(ir.VoidType(), [i64, i64, i64]).as_pointer())
        builder.call(pointer, given[1:])
        return context.get_dummy_value()

    return types.void(types.intp, types.intp, types.intp, types.intp), emit


@intrinsic
def float_from_bits(_: Any, bits: Any) -> tuple[Any, Any]:
    def emit(context: Any, builder: ir.IRBuilder, signature: Any, given: Any) -> ir.Value:
        return builder.bitcast(builder.trunc(given[0], ir.IntType(32)), ir.FloatType())

    return types.float32(types.intp), emit


@intrinsic
def bits_of_float(_: Any, value: Any) -> tuple[Any, Any]:
    """The bits of a float32 that is not negative: in the same order as the values."""

    def emit(context: Any, builder: ir.IRBuilder, signature: Any, given: Any) -> ir.Value:
        return builder.zext(builder.bitcast(given[0], ir.IntType(32)), ir.IntType(64))

    return types.intp(types.float32), emit


@intrinsic
def double_from_bits(_: Any, bits: Any) -> tuple[Any, Any]:
    def emit(context: Any, builder: ir.IRBuilder, signature: Any, given: Any) -> ir.Value:
        return builder.bitcast(given[0], ir.DoubleType())

    return types.float64(types.intp), emit


def float_bits(value: float) -> int:
    return int(struct.unpack("<i", struct.pack("<f", value))[0])


def _region(function: _Function) -> _Function:
    return _compiled(function, parallel=True)


@_region
def _in_parallel(function: int, arguments: int, workers: int) -> None:
    for worker in prange(workers):
        call(function, arguments, worker, workers)


@helper
def run_workers(function: int, arguments: int, workers: int) -> None:
    if workers > 1:
        _in_parallel(function, arguments, workers)
    else:
        call(function, arguments, 0, 1)


@entry
def run_now(function: int, arguments: int, workers: int) -> None:
    run_workers(function, arguments, workers)  # the caller keeps the arguments alive


class _Threads:
    def __init__(self) -> None:
        self.limit = int(numba.config.NUMBA_NUM_THREADS)
        self.applied = threading.local()

    def apply_limit(self) -> None:
        """Numba stores the size of its regions per calling thread."""
        if getattr(self.applied, "limit", None) != self.limit:
            numba.set_num_threads(self.limit)
            self.applied.limit = self.limit


_THREADS = _Threads()
_REGION = threading.RLock()
_COMPILED: list[Any] = []  # Numba frees a function's code with its object; addresses handed out must stay valid


def thread_limit() -> int:
    return _THREADS.limit


def set_thread_limit(limit: int) -> int:
    _THREADS.limit = max(1, min(limit, int(numba.config.NUMBA_NUM_THREADS)))
    return _THREADS.limit


@cache
def threading_layer() -> str:
    """Numba's threading layer ("omp", "tbb", "workqueue"), started by an empty region.

    Must precede every call of compiled code that contains `run_workers`: such code, loaded from the disk cache, does not resolve the
    layer's symbols by itself when the region had come from that cache while it was compiled (numba 0.68), and would jump to address 0.
    """
    _in_parallel(0, 0, 0)
    return str(numba.threading_layer())


def compile_kernel(function: Callable[[int, int, int], None]) -> int:
    """The code lives as long as the process."""
    threading_layer()
    compiled = KeptCFunc(function, normalize_signature(types.void(types.intp, types.intp, types.intp)), locals={}, options=OPTIONS)
    if CACHE.directory is not None:
        compiled.enable_caching()
    compiled.compile()
    _COMPILED.append(compiled)
    address: int = compiled.address
    return address


def guarded(function: Callable[..., None], *arguments: Any) -> None:
    """The workqueue layer ends the process on concurrent entry into a region, so there callers take turns."""
    _THREADS.apply_limit()
    if threading_layer() == "workqueue":
        with _REGION:
            function(*arguments)
    else:
        function(*arguments)


def kernel_names() -> dict[int, str]:
    functions = ((compiled.address, compiled.__wrapped__) for compiled in _COMPILED)
    return {address: f"{function.__module__.rpartition('.')[2]}.{function.__name__}" for address, function in functions}


class Pending(Protocol):
    def allocate_result(self, shape: Sequence[int], dtype: torch.dtype) -> Tensor: ...

    def add(self, kernel: int, memory: array[int], workers: int, touched: tuple[Tensor | np.ndarray, ...]) -> None: ...

    def register_counter(self, memory: array[int]) -> None:
        """The last word of `memory` is a counter, which must be zero when its kernel begins."""
        ...


class _Caller(threading.local):
    pending: Pending | None = None


CALLER = _Caller()


def words(values: Iterable[int]) -> array[int]:
    """int64 words in memory. An `array`, since NumPy takes five times as long to make one and to return its address."""
    return array("q", values)


def with_counter(arguments: Sequence[int]) -> array[int]:
    """`arguments`, the last of which is `counter`, and behind them the zero that `take_ticket` counts from; `counter` is its address."""
    memory = words((*arguments, 0))
    memory[-2] = address_of(memory) + 8 * len(arguments)
    pending = CALLER.pending
    if pending is not None:
        pending.register_counter(memory)
    return memory


def allocate_result(shape: Sequence[int], dtype: torch.dtype) -> Tensor:
    """Memory not written yet. In a launch list it may be a buffer of two layers before, see `launch_list.next_layer`."""
    pending = CALLER.pending
    made = torch.empty(shape, dtype=dtype) if pending is None else pending.allocate_result(shape, dtype)
    if is_poisoned() and made.nbytes:  # by a kernel: pending kernels may still read and write this memory
        launch(_poison_kernel(), PoisonArguments(address=made.data_ptr(), num_bytes=made.nbytes), 1, made)
    return made


class PoisonArguments(NamedTuple):
    address: int
    num_bytes: int


def _poison(arguments: int, worker: int, workers: int) -> None:
    a: PoisonArguments = read_arguments(PoisonArguments, arguments)
    _memset(a.address, POISON, a.num_bytes)


@cache
def _poison_kernel() -> int:
    return compile_kernel(_poison)


def address_of(memory: array[int]) -> int:
    return memory.buffer_info()[0]


def launch(kernel: int, arguments: Sequence[int] | array[int], workers: int, *touched: Tensor | np.ndarray) -> None:
    """Run `kernel` and wait; inside `deferred_launches` and `recording`, append it to the list instead.

    touched: all tensors and arrays whose addresses are among the arguments, kept alive until the kernel has run; a new result comes first.
    """
    memory = arguments if isinstance(arguments, array) else words(arguments)
    pending = CALLER.pending
    if pending is None:
        guarded(run_now, kernel, address_of(memory), workers)
    else:
        pending.add(kernel, memory, workers, touched)
