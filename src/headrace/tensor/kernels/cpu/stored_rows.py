"""Rows of a table that stays in its file, read by the system's `pread`: what was read lately is in the system's cache, and a row costs a
microsecond. Mapped instead, sixteen pages around each row would count as this process's memory, and a disk that fails would end it.
"""

from __future__ import annotations

from functools import cache

import torch
from numba import types
from torch import Tensor

from headrace.core.errors import EngineFatal
from headrace.tensor.kernels.cpu.jit.launch import compile_kernel, launch, words
from headrace.tensor.kernels.cpu.jit.simd import as_i64, load, store
from headrace.tensor.kernels.cpu.together import run_pending

TRIES = 8
"""A signal may end a call that has read nothing yet."""
_pread = types.ExternalFunction("pread", types.intp(types.int32, types.intp, types.intp, types.int64))


def _read_rows(arguments: int, worker: int, workers: int) -> None:
    """Argument 6 becomes 0 when all rows were read."""
    a = as_i64(arguments)
    descriptor, start, row_bytes, ids, count, out = load(a, 0), load(a, 1), load(a, 2), as_i64(load(a, 3)), load(a, 4), load(a, 5)
    for row in range(count):
        done = 0
        while done < row_bytes:
            got, tries = 0, 0
            while got <= 0 and tries < TRIES:
                got = _pread(descriptor, out + row * row_bytes + done, row_bytes - done, start + load(ids, row) * row_bytes + done)
                tries += 1
            if got <= 0:
                return
            done += got
    store(0, a, 6)


@cache
def _kernel() -> int:
    return compile_kernel(_read_rows)


def prepare() -> None:
    """Compile now what reads rows."""
    _kernel()


def read_rows(descriptor: int, start: int, num_rows: int, columns: int, dtype: torch.dtype, ids: Tensor) -> Tensor:
    """Rows `ids` [T] int64 of a table [num_rows, columns] at byte `start` of an open file -> [T, columns].

    Raises: IndexError for an id that is no row; EngineFatal where the file cannot be read, or is shorter than the table: a process
    that starts anew makes another one.
    """
    ids = ids.contiguous()
    if len(ids) and not 0 <= int(ids.min()) <= int(ids.max()) < num_rows:
        raise IndexError(f"an id in {int(ids.min())}..{int(ids.max())} is outside 0..{num_rows - 1}")
    out = torch.empty((len(ids), columns), dtype=dtype)
    memory = words((descriptor, start, columns * dtype.itemsize, ids.data_ptr(), len(ids), out.data_ptr(), 1))
    launch(_kernel(), memory, 1, out, ids)
    run_pending()
    if memory[6]:
        raise EngineFatal("rows of a table cannot be read from the file of packed weights any more")
    return out
