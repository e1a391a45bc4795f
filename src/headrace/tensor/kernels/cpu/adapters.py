"""Low-rank updates of linears (`AdapterKernels`): each token of a step by the adapter that it asks for.

    shrink   sums[k, r] = scale * (down[k] . x[r])     RANKS rows of `down` at a time, by dot products: a rank needs no padding to a strip
    expand   y[r] += sums[:, r] . up                   strips of outputs, as in `linear`

Every sum is the same sequence of operations whatever the panel, the worker and the part. An adapter is one piece of memory with a table of
addresses, and a step names tables: no memory is shared by what is in a place now and what comes next.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache
from typing import Any, NamedTuple, cast

import numpy as np
import torch
from llvmlite import ir
from numba import types
from numba.core import cgutils
from numba.extending import intrinsic
from torch import Tensor
from torch.nn import functional as F

from headrace.tensor.batch import StepAdapters
from headrace.tensor.host import pages
from headrace.tensor.kernels import LowRankUpdate
from headrace.tensor.kernels.cpu.elementwise import share
from headrace.tensor.kernels.cpu.jit.launch import (
    compile_kernel,
    entry,
    float_bits,
    float_from_bits,
    helper,
    launch,
    thread_limit,
    with_counter,
)
from headrace.tensor.kernels.cpu.jit.scalars import as_f32, as_i32, as_i64, at, load, read_arguments, store, take_ticket
from headrace.tensor.kernels.cpu.jit.simd import AHEAD, ROW_STRIPS
from headrace.tensor.kernels.cpu.jit.vector_ir import (
    I32,
    I64,
    LANES,
    STREAM_LEVEL,
    STRIP_COLUMNS,
    VECTOR,
    Emit,
    constant,
    fma,
    fold_lanes,
    for_case,
    gep,
    load_floats,
    prefetch_line,
    widened,
)
from headrace.tensor.kernels.cpu.launch_list import RecordedLaunches, cached_in_step, current_recording, run_pending
from headrace.tensor.kernels.cpu.linear import MOST_ROWS, FloatProduct, as_dtype, as_float32, multiply_panel, panel_rows

Pointer = Any

RANKS = 4
"""Rows of `down` that are multiplied at once: their sums and those of two rows of x hide the latency of an addition. Ranks are padded."""
DOT_ROWS = (4, 2, 1) if LANES == 16 else (2, 1)
"""Rows of x that meet them at once: their sums fill half of the registers."""
CHUNK = 2 * LANES
"""Inputs are padded to a multiple of it: two registers of x, and one of pairs of bfloat16."""
GROUP = ROW_STRIPS * STRIP_COLUMNS
"""Outputs that are added to y at a time."""
PARTS_PER_THREAD = 4
"""A step of few panels cuts each into parts, so that one slow thread does not delay the rest."""
ALIGNMENT = 64


class LinearUpdates(NamedTuple):
    """What an adapter does to one linear: an entry of its table.

    updates: the address of its `Update`s, one behind the other; ranks: theirs together.
    """

    updates: int
    num_updates: int
    ranks: int


class Update(NamedTuple):
    """down, up: addresses. has_pairs: they hold words of two bfloat16."""

    down: int
    up: int
    rank: int
    first_row: int
    rows: int
    scale_bits: int
    has_pairs: int


class Panel(NamedTuple):
    """table: the adapter's; first: the place of its first token in the step's list of them."""

    table: int
    first: int
    rows: int


class StepPanels(NamedTuple):
    """panels, tokens, sums: addresses of `Panel`, int64 and float32. parts: of each panel; most_ranks: floats in `sums` per token."""

    panels: int
    num_panels: int
    parts: int
    tokens: int
    sums: int
    most_ranks: int


class AdapterArguments(NamedTuple):
    """step: the address of `StepPanels`, read when the kernel runs. x is contiguous, y_stride in elements."""

    x: int
    y: int
    y_stride: int
    inputs: int
    linear: int
    step: int
    counter: int


LINEAR_WORDS, UPDATE_WORDS, PANEL_WORDS, STEP_WORDS = (len(each._fields) for each in (LinearUpdates, Update, Panel, StepPanels))


# --- shrink ---


@intrinsic
def dot_rows(
    _: Any, sums: Any, distance: Any, x: Any, tokens: Any, inputs: Any, weights: Any, scale: Any, rows: Any
) -> tuple[Any, Emit]:  # fmt: skip
    """sums[k * distance + r] = scale * (row tokens[r] of x [..., inputs], times row k of the weights), for r < rows, k < RANKS.

    Lane l adds inputs l, l + LANES, ... in order, and then the lanes are added, whatever `rows` is. weights: as `packed_down` leaves them,
    float32 or int32 words of two bfloat16. rows: one of DOT_ROWS.
    """

    def emit(context: Any, builder: ir.IRBuilder, signature: Any, arguments: Any) -> ir.Value:
        given = DotOperands(*arguments[:7])
        cases = {size: functools.partial(_dot_rows, builder, given, weights.dtype, size) for size in DOT_ROWS}
        for_case(builder, arguments[7], cases)
        return context.get_dummy_value()

    return types.void(sums, types.intp, x, tokens, types.intp, weights, types.float32, types.intp), emit


class DotOperands(NamedTuple):
    sums: ir.Value
    distance: ir.Value
    x: ir.Value
    tokens: ir.Value
    inputs: ir.Value
    weights: ir.Value
    scale: ir.Value


def _dot_rows(builder: ir.IRBuilder, o: DotOperands, element: types.Type, num_rows: int) -> None:
    rows = [gep(builder, o.x, builder.mul(builder.load(gep(builder, o.tokens, r), align=8), o.inputs)) for r in range(num_rows)]
    totals = [[cgutils.alloca_once(builder, VECTOR) for _ in range(num_rows)] for _ in range(RANKS)]
    for total in (each for by_row in totals for each in by_row):
        builder.store(constant(VECTOR, 0.0), total)
    whole = builder.udiv(o.inputs, I64(CHUNK))
    with cgutils.for_range(builder, whole) as loop:
        first = builder.mul(loop.index, I64(CHUNK))
        _add_chunk(builder, o.weights, element, loop.index, totals, [_chunk_of(builder, gep(builder, row, first)) for row in rows])
    first = builder.mul(whole, I64(CHUNK))
    left = builder.sub(o.inputs, first)
    with builder.if_then(builder.icmp_signed(">", left, I64(0))):
        _add_chunk(builder, o.weights, element, whole, totals, [_short_chunk(builder, gep(builder, row, first), left) for row in rows])
    for k, by_row in enumerate(totals):
        for r, total in enumerate(by_row):
            value = builder.fmul(fold_lanes(builder, builder.load(total), builder.fadd), o.scale)
            builder.store(value, gep(builder, o.sums, builder.add(builder.mul(o.distance, I64(k)), I64(r))))


def _chunk_of(builder: ir.IRBuilder, where: ir.Value) -> list[ir.Value]:
    return [load_floats(builder, gep(builder, where, part * LANES), types.float32, VECTOR) for part in range(2)]


def _short_chunk(builder: ir.IRBuilder, where: ir.Value, left: ir.Value) -> list[ir.Value]:
    """Zeros where there are no inputs: memory behind them is not read."""
    flags = ir.VectorType(ir.IntType(1), LANES)
    pointer = VECTOR.as_pointer()
    function_type = ir.FunctionType(VECTOR, [pointer, I32, flags, VECTOR])
    function = cgutils.get_or_insert_function(builder.module, function_type, f"llvm.masked.load.v{LANES}f32.p0")
    halves = []
    for part in range(2):
        mask: ir.Value = ir.Constant(flags, [0] * LANES)
        for lane in range(LANES):
            mask = builder.insert_element(mask, builder.icmp_signed("<", I64(part * LANES + lane), left), I32(lane))
        address = builder.bitcast(gep(builder, where, part * LANES), pointer)
        halves.append(builder.call(function, [address, I32(4), mask, constant(VECTOR, 0.0)]))
    return halves


def _add_chunk(
    builder: ir.IRBuilder, weights: ir.Value, element: types.Type, index: ir.Value, totals: list[list[ir.Value]], x: list[list[ir.Value]]
) -> None:  # fmt: skip
    """x: per row, its two registers."""
    items = LANES if element == types.int32 else CHUNK
    start = gep(builder, weights, builder.mul(index, I64(RANKS * items)))
    for line in range(0, RANKS * items, 16):
        prefetch_line(builder, gep(builder, start, AHEAD * STRIP_COLUMNS + line), STREAM_LEVEL)
    for k, by_row in enumerate(totals):
        place = gep(builder, start, k * items)
        if element == types.int32:
            right = widened(builder, builder.load(builder.bitcast(place, ir.VectorType(I32, LANES).as_pointer()), align=4))
        else:
            right = _chunk_of(builder, place)
        for total, left in zip(by_row, x, strict=True):
            value = builder.load(total)
            for part in range(2):
                value = fma(builder, left[part], right[part], value)
            builder.store(value, total)


@helper
def dot_panel(sums: Pointer, x: Pointer, tokens: Pointer, count: int, inputs: int, weights: Pointer, scale: float) -> None:
    row = 0
    while row < count:
        taken = DOT_ROWS[0]
        while taken > count - row:
            taken //= 2
        dot_rows(at(sums, row), count, x, at(tokens, row), inputs, weights, scale, taken)
        row += taken


@helper
def shrink(a: AdapterArguments, s: StepPanels, panel: Panel, part: int) -> None:
    mine: LinearUpdates = read_arguments(LinearUpdates, panel.table + 8 * LINEAR_WORDS * a.linear)
    first, last = share(mine.ranks // RANKS, part, s.parts)
    tokens, sums, passed = at(as_i64(s.tokens), panel.first), at(as_f32(s.sums), panel.first * s.most_ranks), 0
    padded_inputs = -(-a.inputs // CHUNK) * CHUNK
    for number in range(mine.num_updates):
        u: Update = read_arguments(Update, mine.updates + 8 * UPDATE_WORDS * number)
        for block in range(max(first - passed, 0), min(last - passed, u.rank // RANKS)):
            target, start = at(sums, (passed + block) * RANKS * panel.rows), block * RANKS * padded_inputs
            scale = float_from_bits(u.scale_bits)
            if u.has_pairs != 0:
                dot_panel(target, as_f32(a.x), tokens, panel.rows, a.inputs, at(as_i32(u.down), start // 2), scale)
            else:
                dot_panel(target, as_f32(a.x), tokens, panel.rows, a.inputs, at(as_f32(u.down), start), scale)
        passed += u.rank // RANKS


# --- expand ---


@helper
def expand_group(u: Update, sums: Pointer, added: Pointer, zeros: Pointer, count: int, group: int) -> None:
    """added [count, GROUP]: the update of these outputs."""
    strips, start = min(ROW_STRIPS, -(-u.rows // STRIP_COLUMNS) - group * ROW_STRIPS), group * GROUP * u.rank
    if u.has_pairs != 0:
        pairs = FloatProduct(sums, as_i32(u.up), added, zeros, count, u.rank, GROUP, 1, 2)
        multiply_panel(pairs, at(as_i32(u.up), start // 2), 0, count, 0, strips, 0, u.rank)
    else:
        floats = FloatProduct(sums, as_f32(u.up), added, zeros, count, u.rank, GROUP, 1, 1)
        multiply_panel(floats, at(as_f32(u.up), start), 0, count, 0, strips, 0, u.rank)


@helper
def add_floats(y: Pointer, added: Pointer, columns: int) -> None:
    for i in range(columns):
        store(load(y, i) + load(added, i), y, i)


@helper
def expand(a: AdapterArguments, s: StepPanels, panel: Panel, part: int, added: Pointer, zeros: Pointer) -> None:
    mine: LinearUpdates = read_arguments(LinearUpdates, panel.table + 8 * LINEAR_WORDS * a.linear)
    tokens, sums = at(as_i64(s.tokens), panel.first), at(as_f32(s.sums), panel.first * s.most_ranks)
    for number in range(mine.num_updates):
        u: Update = read_arguments(Update, mine.updates + 8 * UPDATE_WORDS * number)
        first, last = share(-(-u.rows // GROUP), part, s.parts)
        for group in range(first, last):
            expand_group(u, sums, added, zeros, panel.rows, group)
            columns = min(GROUP, u.rows - group * GROUP)
            for row in range(panel.rows):
                place = load(tokens, row) * a.y_stride + u.first_row + group * GROUP
                add_floats(at(as_f32(a.y), place), at(added, row * GROUP), columns)
        sums = at(sums, u.rank * panel.rows)


# --- a step ---


@helper
def read_panel(s: StepPanels, item: int) -> Panel:
    panel: Panel = read_arguments(Panel, s.panels + 8 * PANEL_WORDS * (item // s.parts))
    return panel


def _shrink(arguments: int, worker: int, workers: int) -> None:
    a: AdapterArguments = read_arguments(AdapterArguments, arguments)
    s: StepPanels = read_arguments(StepPanels, a.step)
    item = take_ticket(as_i64(a.counter))
    while item < s.num_panels * s.parts:
        shrink(a, s, read_panel(s, item), item % s.parts)
        item = take_ticket(as_i64(a.counter))


def _expand(arguments: int, worker: int, workers: int) -> None:
    a: AdapterArguments = read_arguments(AdapterArguments, arguments)
    s: StepPanels = read_arguments(StepPanels, a.step)
    memory = np.zeros((MOST_ROWS + 1) * GROUP, np.float32)
    zeros, item = as_f32(memory.ctypes.data), take_ticket(as_i64(a.counter))
    while item < s.num_panels * s.parts:
        expand(a, s, read_panel(s, item), item % s.parts, at(zeros, GROUP), zeros)
        item = take_ticket(as_i64(a.counter))
    memory[0] = 0.0  # the memory lives until here


@cache
def _kernels() -> tuple[int, int]:
    return compile_kernel(_shrink), compile_kernel(_expand)


@entry
def plan_panels(slots_at: int, num_tokens: int, tables: np.ndarray, threads: int, words: np.ndarray) -> tuple[int, int, np.ndarray]:
    """(number of panels, parts of each, tokens by place). tables: by place, 0 where there is no adapter.

    Writes to `words` the panels, one behind the other, and from PANEL_WORDS * num_tokens on the tokens in order of place.
    """
    slots, counts = as_i32(slots_at), np.zeros(len(tables), np.int64)
    for token in range(num_tokens):
        place = load(slots, token)
        assert place == 0 or (0 < place < len(tables) and tables[place] != 0), "a token's place holds no adapter"
        counts[place] += 1
    first, panel = 0, 0
    for place in range(1, len(tables)):
        row = 0
        while row < counts[place]:
            count = panel_rows(counts[place] - row)
            words[PANEL_WORDS * panel : PANEL_WORDS * (panel + 1)] = Panel(tables[place], first + row, count)
            row += count
            panel += 1
        first += counts[place]
    ends = np.cumsum(counts) - counts[0]
    for token in range(num_tokens - 1, -1, -1):
        place = load(slots, token)
        if place != 0:
            ends[place] -= 1
            words[PANEL_WORDS * num_tokens + ends[place]] = token
    return panel, -(-PARTS_PER_THREAD * threads // panel) if panel else 0, counts


class AdapterPlan:
    """The panels of a step's tokens, for all of its linears; made anew before each replay, in the same memory.

    linears: those that an adapter of these tokens changes.
    """

    def __init__(self, step: StepAdapters, num_tokens: int) -> None:
        self.step, self.num_tokens = step, num_tokens
        self.words = np.zeros(STEP_WORDS + (PANEL_WORDS + 1) * num_tokens, np.int64)
        self.sums = np.zeros(0, np.float32)
        self.linears: frozenset[int] = frozenset()
        self.places: list[tuple[int, int]] = []
        self.make()

    def make(self) -> None:
        resident = cast("tuple[NumbaAdapter | None, ...]", self.step.resident)
        tables = np.array([0 if each is None else each.address for each in resident], np.int64)
        slots = self.step.slots_of(self.num_tokens)
        panels = self.words[STEP_WORDS:]
        num_panels, parts, counts = plan_panels(slots.data_ptr(), self.num_tokens, tables, thread_limit(), panels)
        used = [each for each, count in zip(resident, counts.tolist(), strict=True) if each is not None and count]
        most_ranks = max((each.most_ranks for each in used), default=0)
        if len(self.sums) < most_ranks * self.num_tokens:
            self.sums = np.empty(most_ranks * self.num_tokens, np.float32)
        self.linears = frozenset().union(*(each.linears for each in used))
        address = panels.ctypes.data
        self.words[:STEP_WORDS] = StepPanels(
            panels=address,
            num_panels=num_panels,
            parts=parts,
            tokens=address + 8 * PANEL_WORDS * self.num_tokens,
            sums=self.sums.ctypes.data,
            most_ranks=most_ranks,
        )

    def workers(self, linear: int) -> int:
        """0: the kernel is passed over, which a recorded list can change later."""
        return thread_limit() if linear in self.linears else 0

    def __call__(self, recorded: RecordedLaunches) -> bool:
        self.make()
        for linear, place in self.places:
            recorded.set_workers(place, self.workers(linear))
        return True


# --- adapters ---


@dataclass(slots=True, eq=False)
class NumbaAdapter:
    """table: `LinearUpdates` of all linears, then all `Update`, with addresses of `memory`. address: the table's. linears: those with an
    update."""

    memory: Tensor
    table: np.ndarray
    address: int
    linears: frozenset[int]
    most_ranks: int
    num_bytes: int


def packed_down(down: Tensor) -> Tensor:
    """[r, in] -> by RANKS rows and CHUNK inputs; bfloat16: a register of words has inputs i in the low halves and LANES + i in the high."""
    wide = F.pad(down, (0, -down.shape[1] % CHUNK, 0, -down.shape[0] % RANKS))
    by_chunk = wide.reshape(-1, RANKS, wide.shape[1] // CHUNK, 2, LANES).transpose(1, 2)
    return by_chunk.transpose(3, 4) if down.dtype == torch.bfloat16 else by_chunk


def packed_up(up: Tensor) -> Tensor:
    """[rows, r] -> strips [rank, STRIP_COLUMNS], or words of two neighbours in bfloat16 [rank / 2, STRIP_COLUMNS]."""
    wide = F.pad(up, (0, -up.shape[1] % RANKS, 0, -up.shape[0] % STRIP_COLUMNS))
    by_strip = wide.reshape(-1, STRIP_COLUMNS, wide.shape[1] // 2, 2)
    return by_strip.permute((0, 2, 1, 3) if up.dtype == torch.bfloat16 else (0, 2, 3, 1))


def _update_entry(update: LowRankUpdate, rank: int, down: int, up: int) -> Update:
    return Update(
        down=down,
        up=up,
        rank=rank,
        first_row=update.first_row,
        rows=len(update.up),
        scale_bits=float_bits(update.scale),
        has_pairs=update.down.dtype == torch.bfloat16,
    )


class NumbaAdapters:
    """Implements `AdapterKernels`. Packing runs no kernel, so that any thread may do it."""

    def pack(self, linears: Sequence[Sequence[LowRankUpdate]]) -> NumbaAdapter:
        parts = [part for updates in linears for each in updates for part in (packed_down(each.down), packed_up(each.up))]
        sizes = [-(-part.nbytes // ALIGNMENT) * ALIGNMENT for part in parts]
        memory = pages.empty(sum(sizes), torch.uint8)
        for part, piece in zip(parts, torch.split(memory, sizes), strict=True):
            piece[: part.nbytes].view(part.dtype).copy_(part.reshape(-1))
        addresses = iter((memory.data_ptr() + np.cumsum([0, *sizes])).tolist())
        table = np.zeros(LINEAR_WORDS * len(linears) + UPDATE_WORDS * len(parts) // 2, np.int64)
        place, all_ranks = LINEAR_WORDS * len(linears), []
        for number, updates in enumerate(linears):
            ranks = [-(-len(each.down) // RANKS) * RANKS for each in updates]
            of_linear = LinearUpdates(updates=table.ctypes.data + 8 * place, num_updates=len(updates), ranks=sum(ranks))
            table[LINEAR_WORDS * number : LINEAR_WORDS * (number + 1)] = of_linear
            for each, rank in zip(updates, ranks, strict=True):
                table[place : place + UPDATE_WORDS] = _update_entry(each, rank, next(addresses), next(addresses))
                place += UPDATE_WORDS
            all_ranks.append(sum(ranks))
        changed = frozenset(number for number, ranks in enumerate(all_ranks) if ranks)
        return NumbaAdapter(memory, table, table.ctypes.data, changed, max(all_ranks, default=0), memory.nbytes + table.nbytes)

    def apply(self, y: Tensor, x: Tensor, linear: int, step: StepAdapters) -> Tensor:
        plan, recorded = cached_in_step((id(step), len(x)), lambda: AdapterPlan(step, len(x))), current_recording()
        if recorded is None and linear not in plan.linears:
            return y
        wide, sums = as_float32(x), y
        if y.dtype != torch.float32:
            run_pending()
            sums = y.float()
        arguments = AdapterArguments(
            x=wide.data_ptr(),
            y=sums.data_ptr(),
            y_stride=sums.stride(0),
            inputs=x.shape[1],
            linear=linear,
            step=plan.words.ctypes.data,
            counter=0,
        )
        for kernel in _kernels():
            if recorded is not None:
                recorded.argument_update((id(step), len(x)), lambda: plan).places.append((linear, recorded.num_entries))
            launch(kernel, with_counter(arguments), plan.workers(linear), sums, wide, plan.words, plan.sums)
        return as_dtype(sums, y.dtype)


ADAPTERS = NumbaAdapters()
