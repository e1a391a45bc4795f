"""Reads rows of an embedding table that stays in its file, with `pread`: a microsecond for a row that is in the page cache."""

from __future__ import annotations

from functools import cache
from typing import NamedTuple

import torch
from numba import types
from torch import Tensor

from headrace.tensor.kernels.cpu.jit.launch import address_of, compile_kernel, launch, words
from headrace.tensor.kernels.cpu.jit.scalars import as_i64, load, read_arguments, store
from headrace.tensor.kernels.cpu.launch_list import run_pending

TRIES = 8
"""Calls of `pread` before the file counts as unreadable. A signal may interrupt a call before it has read a byte."""
_pread = types.ExternalFunction("pread", types.intp(types.int32, types.intp, types.intp, types.int64))


class RowArguments(NamedTuple):
    """is_complete: address of an int64 that becomes 1."""

    descriptor: int
    start: int
    row_bytes: int
    ids: int
    num_rows: int
    out: int
    is_complete: int


def _read_rows(arguments: int, worker: int, workers: int) -> None:
    a: RowArguments = read_arguments(RowArguments, arguments)
    for row in range(a.num_rows):
        target, source, done = a.out + row * a.row_bytes, a.start + load(as_i64(a.ids), row) * a.row_bytes, 0
        while done < a.row_bytes:
            got, tries = 0, 0
            while got <= 0 and tries < TRIES:
                got = _pread(a.descriptor, target + done, a.row_bytes - done, source + done)
                tries += 1
            if got <= 0:
                return
            done += got
    store(1, as_i64(a.is_complete), 0)


@cache
def _kernel() -> int:
    return compile_kernel(_read_rows)


def prepare() -> None:
    _kernel()


def read_rows(descriptor: int, start: int, num_rows: int, columns: int, dtype: torch.dtype, ids: Tensor) -> Tensor:
    ids = ids.contiguous()
    if len(ids) and not 0 <= int(ids.min()) <= int(ids.max()) < num_rows:
        raise IndexError(f"an id in {int(ids.min())}..{int(ids.max())} is outside 0..{num_rows - 1}")
    out = torch.empty((len(ids), columns), dtype=dtype)
    is_complete = words((0,))
    arguments = RowArguments(
        descriptor=descriptor,
        start=start,
        row_bytes=columns * dtype.itemsize,
        ids=ids.data_ptr(),
        num_rows=len(ids),
        out=out.data_ptr(),
        is_complete=address_of(is_complete),
    )
    launch(_kernel(), arguments, 1, out, ids)
    run_pending()
    if not is_complete[0]:
        raise OSError("rows of a table cannot be read from the file of packed weights")
    return out
