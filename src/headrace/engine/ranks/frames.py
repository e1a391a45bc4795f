"""Encodes and decodes the frames between rank 0 and the other ranks of a replica. Nothing in a frame can name code.

4 bytes  MAGIC
4 bytes  kind, little endian
8 bytes  number of bytes of the payload
payload  numbers and arrays in this machine's byte order, JSON, or nothing

A payload's length is held against what its reader allows before memory is taken for it, and a step's arrays against what a step may
have. Anything else raises EngineFatal, which ends the replica. Values within the arrays are not checked: rank 0 is this user's, or has
shown certificate and token (`network`), and is of this version.
"""

from __future__ import annotations

import json
import math
import struct
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from enum import IntEnum
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from headrace.core.errors import ConfigError, EngineFatal
from headrace.core.strict_decode import Value, decode, plain
from headrace.tensor.batch import ForwardBatch, GroupBatch, PackedAdapter, StepAdapters

MAGIC = b"HRK1"
HEADER = struct.Struct("<4sIQ")
INT_BYTES = 8
MAX_JSON_BYTES = 1 << 16
NO_ADAPTER = -1


class OtherProtocol(EngineFatal):
    """What came is no frame of ranks."""


class FrameKind(IntEnum):
    HELLO = 1
    WELCOME = 2
    FAILED = 3
    SIZES = 4
    BLOCKS = 5
    READY = 6
    BEAT = 7
    STEP = 8
    LOGITS = 9
    COPY = 10
    CLEAR = 11
    END = 12
    ADAPTER = 13
    LOADED = 14
    DROP = 15
    AUTHENTICATED = 16
    HIDDEN = 17


Allowed = Mapping[FrameKind, int]
"""The kinds that a reader takes, each with the most bytes of its payload."""


@dataclass(frozen=True, slots=True)
class RankHello:
    """
    facts    by name, what has to be equal on all ranks
    machine  its name, where stages are apart
    address  where it takes the hidden states of the stage before its own, if it does
    """

    rank: int
    facts: dict[str, str]
    machine: str = ""
    address: str = ""


@dataclass(frozen=True, slots=True)
class RankWelcome:
    """
    group  random, the same for all ranks of the replica
    next   address of the stage to which this rank sends hidden states; empty: it sends none
    """

    group: str
    next: str


@dataclass(frozen=True, slots=True)
class RankFailure:
    """is_refused: starting again with the same options fails again"""

    reason: str
    is_refused: bool


@dataclass(frozen=True, slots=True)
class RankSizes:
    """
    num_blocks         of a full-attention group, pad block included, that fit this rank's memory
    weight_bytes       of this rank's part
    checkpoint_digest  of the whole checkpoint, whose tensors it samples
    weights_digest     of every byte; empty where no pull and no earlier start has hashed the files on this rank's machine
    """

    num_blocks: int
    weight_bytes: int
    checkpoint_digest: str
    weights_digest: str = ""


@dataclass(frozen=True, slots=True)
class AdapterOrder:
    """
    number  by which steps name the adapter, never used before
    folder  absolute, links followed where it has to be below a root
    digest  of both files, as rank 0 has inspected them
    """

    number: int
    folder: str
    digest: str


@dataclass(frozen=True, slots=True)
class LoadedAdapter:
    """reason: why it cannot be used; empty: it can"""

    number: int
    reason: str


Said = RankHello | RankWelcome | RankFailure | RankSizes | AdapterOrder | LoadedAdapter


def frame(kind: FrameKind, *arrays: NDArray[Any]) -> bytes:
    parts = [array.tobytes() for array in arrays]
    return b"".join((HEADER.pack(MAGIC, kind, sum(map(len, parts))), *parts))


def int_frame(kind: FrameKind, *numbers: int) -> bytes:
    return frame(kind, np.array(numbers, dtype=np.int64))


def json_frame(kind: FrameKind, value: Said) -> bytes:
    data = json.dumps(plain(value)).encode()
    return HEADER.pack(MAGIC, kind, len(data)) + data


def read_header(data: bytes | bytearray, allowed: Allowed) -> tuple[FrameKind, int]:
    """The kind and the payload's length. Raises EngineFatal."""
    magic, number, num_bytes = HEADER.unpack_from(data)
    if magic != MAGIC:
        raise OtherProtocol(f"a frame begins with {bytes(magic)!r} instead of {MAGIC!r}")
    if number not in allowed:
        kinds = ", ".join(kind.name for kind in allowed)
        raise EngineFatal(f"a frame of kind {number} where only {kinds} may come")
    kind = FrameKind(number)
    if num_bytes > allowed[kind]:
        raise EngineFatal(f"a frame of kind {kind.name} has {num_bytes} bytes, more than {allowed[kind]}")
    return kind, num_bytes


def read_ints(payload: bytearray, count: int) -> list[int]:
    if len(payload) != INT_BYTES * count:
        raise EngineFatal(f"a frame has {len(payload)} bytes instead of {count} numbers")
    return [int(number) for number in np.frombuffer(payload, dtype=np.int64)]


def read_json(kind: type[Value], payload: bytearray) -> Value:
    try:
        return decode(kind, json.loads(payload))
    except (ConfigError, ValueError, RecursionError) as error:
        raise EngineFatal(f"a frame is no {kind.__name__}: {error}") from error


@dataclass(frozen=True, slots=True)
class StepLimits:
    """What a step may have.

    table_width  blocks of a row's block table, for each of `num_groups` KV groups
    max_places   of adapters, with that of the base model; 0: there are no adapters
    """

    max_tokens: int
    max_rows: int
    table_width: int
    num_groups: int
    max_places: int = 0

    @property
    def max_bytes(self) -> int:
        widths = (self.table_width,) * self.num_groups
        sizes = _StepSizes(self.max_tokens, self.max_rows, self.max_tokens, 1, 0, self.max_places, widths)
        return sizes.num_bytes

    @property
    def allowed(self) -> Allowed:
        """What rank 0 sends once sizes are agreed."""
        return {
            FrameKind.STEP: self.max_bytes,
            FrameKind.LOGITS: INT_BYTES,
            FrameKind.COPY: 3 * INT_BYTES,
            FrameKind.CLEAR: 0,
            FrameKind.END: 0,
            **({FrameKind.ADAPTER: MAX_JSON_BYTES, FrameKind.DROP: INT_BYTES} if self.max_places else {}),
        }


_NUM_SIZES = 6
"""Beside the widths of the tables."""


@dataclass(frozen=True, slots=True)
class _StepSizes:
    """The numbers in front of a step's arrays.

    num_selected  -1 where the hidden states of all tokens are wanted
    num_places    of adapters; 0: all tokens are the base model's
    """

    num_tokens: int
    num_rows: int
    num_selected: int
    max_count: int
    num_decodes: int
    num_places: int
    widths: tuple[int, ...]

    @classmethod
    def read(cls, payload: bytearray, num_groups: int) -> _StepSizes:
        count = _NUM_SIZES + num_groups
        tokens, rows, selected, max_count, decodes, places, *widths = read_ints(payload[: INT_BYTES * count], count)
        return cls(tokens, rows, selected, max_count, decodes, places, tuple(widths))

    @property
    def numbers(self) -> NDArray[np.int64]:
        before = (self.num_tokens, self.num_rows, self.num_selected, self.max_count, self.num_decodes, self.num_places)
        return np.array([*before, *self.widths], dtype=np.int64)

    @property
    def shapes(self) -> list[tuple[type[np.int64] | type[np.int32], tuple[int, ...]]]:
        """The arrays in their order, the wider integers first, so that all are aligned."""
        num_longs = 2 + (self.num_selected >= 0) + len(self.widths)
        longs = [(self.num_tokens,)] * num_longs
        if self.num_selected >= 0:
            longs[2] = (self.num_selected,)
        ints = [(self.num_rows + 1,), (self.num_rows,), *((self.num_rows, width) for width in self.widths)]
        if self.num_places:
            longs.append((self.num_places,))
            ints.append((self.num_tokens,))
        return [*((np.int64, shape) for shape in longs), *((np.int32, shape) for shape in ints)]

    @property
    def num_bytes(self) -> int:
        arrays = sum(math.prod(shape) * np.dtype(dtype).itemsize for dtype, shape in self.shapes)
        return INT_BYTES * (_NUM_SIZES + len(self.widths)) + arrays

    def check(self, limits: StepLimits) -> None:
        bounds = (
            ("num_tokens", self.num_tokens, 1, limits.max_tokens),
            ("num_rows", self.num_rows, 1, min(self.num_tokens, limits.max_rows)),
            ("num_selected", self.num_selected, -1, self.num_tokens),
            ("max_count", self.max_count, 1, self.num_tokens),
            ("num_decodes", self.num_decodes, 0, self.num_rows),
            ("num_places", self.num_places, 0, limits.max_places),
            *(("table width", width, 1, limits.table_width) for width in self.widths),
        )
        for name, value, low, high in bounds:
            if not low <= value <= high:
                raise EngineFatal(f"a step's {name} is {value}, outside {low}..{high}")


def step_frame(ids: Tensor, batch: ForwardBatch, adapters: Sequence[int] = ()) -> bytes:
    """ids [T]; adapters: numbers by place, NO_ADAPTER where there is none. The batch is on the host."""
    selected = () if batch.selected is None else (batch.selected,)
    tables = [group.block_table for group in batch.groups]
    sizes = _StepSizes(
        num_tokens=batch.num_tokens,
        num_rows=len(batch.context_lens),
        num_selected=-1 if batch.selected is None else len(batch.selected),
        max_count=batch.max_count,
        num_decodes=batch.num_decodes,
        num_places=len(adapters),
        widths=tuple(table.shape[1] for table in tables),
    )
    places, slots = ((), ()) if batch.adapters is None else ((torch.tensor(adapters),), (batch.adapters.slots,))
    longs: Sequence[Tensor] = (ids, batch.positions, *selected, *(group.slot_mapping for group in batch.groups), *places)
    ints: Sequence[Tensor] = (batch.row_starts, batch.context_lens, *tables, *slots)
    return frame(FrameKind.STEP, sizes.numbers, *(tensor.numpy() for tensor in (*longs, *ints)))


def read_step(payload: bytearray, limits: StepLimits, parts: Mapping[int, PackedAdapter | None]) -> tuple[Tensor, ForwardBatch]:
    """What `step_frame` was given; views of the payload. parts: of adapters, by number. Raises EngineFatal."""
    sizes = _StepSizes.read(payload, limits.num_groups)
    sizes.check(limits)
    if len(payload) != sizes.num_bytes:
        raise EngineFatal(f"a step of {sizes.num_tokens} tokens has {len(payload)} bytes instead of {sizes.num_bytes}")
    arrays: list[Tensor] = []
    offset = sizes.numbers.nbytes
    for dtype, shape in sizes.shapes:
        array = np.frombuffer(payload, dtype, math.prod(shape), offset).reshape(shape)
        arrays.append(torch.from_numpy(array))
        offset += array.nbytes
    ids, positions, *rest = arrays
    selected = rest.pop(0) if sizes.num_selected >= 0 else None
    num_groups, adapters = limits.num_groups, None
    mappings, rest = rest[:num_groups], rest[num_groups:]
    if sizes.num_places:
        slots = rest.pop()
        resident = _resident(rest.pop(0).tolist(), parts)
        adapters = StepAdapters(slots, resident, None if selected is None else slots[selected])
    row_starts, context_lens, *tables = rest
    groups = tuple(GroupBatch(table, mapping) for table, mapping in zip(tables, mappings, strict=True))
    return ids, ForwardBatch(
        positions, row_starts, context_lens, sizes.max_count, groups, adapters, selected=selected, num_decodes=sizes.num_decodes
    )


def batch_on(device: str, batch: ForwardBatch) -> ForwardBatch:
    """Without adapters."""

    def moved(x: Tensor) -> Tensor:
        return x.to(device)

    return replace(
        batch,
        positions=moved(batch.positions),
        row_starts=moved(batch.row_starts),
        context_lens=moved(batch.context_lens),
        groups=tuple(GroupBatch(moved(group.block_table), moved(group.slot_mapping)) for group in batch.groups),
        selected=None if batch.selected is None else moved(batch.selected),
    )


def _resident(numbers: Sequence[int], parts: Mapping[int, PackedAdapter | None]) -> tuple[PackedAdapter | None, ...]:
    resident = tuple(parts.get(number) for number in numbers)
    for number, part in zip(numbers, resident, strict=True):
        if part is None and number != NO_ADAPTER:
            raise EngineFatal(f"a step names adapter {number}, which is not loaded")
    return resident
