"""`Peers` for CPUs: exchanges between the ranks of one machine, through memory that all of them map.

Ranks exchange in groups: those of a stage, and the two at the ends of a link between stages. Every member has a counter of the exchanges at
which it has arrived, and two areas, which it writes in turns. In exchange n

    a writer    waits until all members have arrived n times, writes its area n % 2, and arrives
    a reader    waits until the writers have arrived n + 1 times, and reads their areas; if it is no writer, it arrives then

Having arrived n times means that a member has read what was written in exchange n - 2, whose areas are written next. So a sum, in which
each member writes and reads, takes one wait. An exchange is a kernel, which a list of launches may hold: all that it knows of earlier ones
is in the shared memory. Larger tensors take several exchanges.
"""

from __future__ import annotations

from functools import cache
from mmap import mmap
from typing import ClassVar, NamedTuple

import numpy as np
import torch
from numba import types
from torch import Tensor

from headrace.core.errors import EngineFatal
from headrace.core.parallelism import Parallelism, Place, RankWork
from headrace.tensor.kernels.cpu.elementwise import share, workers_for
from headrace.tensor.kernels.cpu.jit.launch import allocate_result, compile_kernel, helper, launch
from headrace.tensor.kernels.cpu.jit.scalars import (
    as_bf16,
    as_f32,
    as_i64,
    compare_and_set,
    increment,
    load,
    load_acquire,
    monotonic_ns,
    pause,
    read_arguments,
    store,
)
from headrace.tensor.kernels.cpu.jit.simd import add_rows
from headrace.tensor.kernels.cpu.launch_list import deferred_launches, sched_yield, waited_more

AREA_BYTES = 256 << 10
"""Small enough for the areas of a group to stay in caches, and so large that the wait for the other members costs little beside it."""
LINE_BYTES = 64
"""What one rank writes and another one polls stands in a cache line of its own."""
MEMBER_BYTES = 2 * LINE_BYTES
"""Each member counts the exchanges at which it has arrived, and in another line its workers that have arrived at the next one, and for
`RankWork` the nanoseconds that its first worker has waited, which begin after the first spins, and the bytes that it has written."""
WAITED, WRITTEN = 1, 2
"""Words of that line."""
STEPS_NS = 1
"""In the first page each rank has a line, with the nanoseconds of its steps in this word. That of rank 0 begins with the word that ends all
waits; its steps are not measured."""
PAGE_BYTES = 4096
MAX_WAIT_S = 60.0
"""Longest wait for a rank of the same stage: these compute the same step at the same time."""
MAX_LINK_WAIT_S = 600.0
"""Longest wait for another stage: it may have a whole step to compute."""
NUM_SPINS = 1 << 10
YIELD_NS = 100_000
"""A wait spins first, then gives its processor to whatever else may run, and from this time on sleeps in between."""
MAX_NAP_US = 200
MOVE, GATHER, SUM_F32, SUM_BF16 = range(4)
"""MOVE: the first member's tensor becomes that of all. GATHER: the first member alone reads."""
SUMS = {torch.float32: SUM_F32, torch.bfloat16: SUM_BF16}
ABORTED, LATE = 1, 2
"""The word that ends all waits: 0 at first; ABORTED; LATE + the rank that was waited for too long."""
_memcpy = types.ExternalFunction("memcpy", types.intp(types.intp, types.intp, types.intp))
_usleep = types.ExternalFunction("usleep", types.int32(types.uint32))


class ExchangeArguments(NamedTuple):
    """x and out are contiguous. row_bytes: of x, for GATHER. group: the address of its counters; areas: of its areas, two for each member,
    those of odd exchanges last. abort: the address of the word. first_rank, rank_step: the rank of member m is first_rank + m * rank_step.
    """

    operation: int
    x: int
    out: int
    num_bytes: int
    row_bytes: int
    group: int
    areas: int
    member: int
    members: int
    abort: int
    limit_ns: int
    first_rank: int
    rank_step: int


@helper
def note(a: ExchangeArguments, word: int, amount: int) -> None:
    line = as_i64(a.group + MEMBER_BYTES * a.member + LINE_BYTES)
    store(load(line, word) + amount, line, word)


@helper
def wait_for(a: ExchangeArguments, members: int, arrivals: int, worker: int) -> bool:
    """For the group's first `members`; False once the ranks wait no more. Naps grow with the time waited, to be short beside it."""
    abort, spins, last, waited = as_i64(a.abort), 0, 0, 0
    for member in range(members):
        counter = as_i64(a.group + MEMBER_BYTES * member)
        while load_acquire(counter) < arrivals:
            spins += 1
            if spins <= NUM_SPINS:
                pause()
                continue
            now = monotonic_ns()
            waited, last = waited_more(waited, last, now), now
            if waited > a.limit_ns:
                compare_and_set(abort, LATE + a.first_rank + a.rank_step * member)
            if load_acquire(abort) != 0:
                return False
            if waited < YIELD_NS:
                sched_yield()
            else:
                _usleep(min(waited // 8000, MAX_NAP_US))
    if waited > 0 and worker == 0:
        note(a, WAITED, waited)
    return True


@helper
def arrive(a: ExchangeArguments, workers: int) -> None:
    """The last worker arrives for its rank, whose others have all begun this exchange, and cannot have begun the next one."""
    counter = a.group + MEMBER_BYTES * a.member
    arrived = as_i64(counter + LINE_BYTES)
    if increment(arrived) == workers - 1:
        store(0, arrived, 0)
        increment(as_i64(counter))


@helper
def gather_bytes(a: ExchangeArguments, area: int, offset: int, first: int, last: int) -> None:
    """Copy the bytes first .. last of all areas, which hold x from its byte `offset` on, to their places in the rows of out."""
    while first < last:
        row, column = (offset + first) // a.row_bytes, (offset + first) % a.row_bytes
        count = min(last - first, a.row_bytes - column)
        for member in range(a.members):
            _memcpy(a.out + (row * a.members + member) * a.row_bytes + column, area + member * AREA_BYTES + first, count)
        first += count


@helper
def read_areas(a: ExchangeArguments, area: int, offset: int, first: int, last: int) -> None:
    out, source = a.out + offset + first, area + first
    if a.operation == SUM_F32:
        add_rows(as_f32(out), as_f32(source), AREA_BYTES // 4, a.members, (last - first) // 4)
    elif a.operation == SUM_BF16:
        add_rows(as_bf16(out), as_bf16(source), AREA_BYTES // 2, a.members, (last - first) // 2)
    elif a.operation == GATHER:
        gather_bytes(a, area, offset, first, last)
    else:
        _memcpy(out, source, last - first)


def _exchange(arguments: int, worker: int, workers: int) -> None:
    """The counter read first stays until all workers have read it: it counts no exchange at which one of them has not arrived."""
    a: ExchangeArguments = read_arguments(ExchangeArguments, arguments)
    number = load_acquire(as_i64(a.group + MEMBER_BYTES * a.member))
    is_writer = a.operation != MOVE or a.member == 0
    is_reader = a.operation != (MOVE if a.member == 0 else GATHER)
    for offset in range(0, a.num_bytes, AREA_BYTES):
        size = min(a.num_bytes - offset, AREA_BYTES)
        first, last = share((size + LINE_BYTES - 1) // LINE_BYTES, worker, workers)
        first, last = first * LINE_BYTES, min(last * LINE_BYTES, size)
        area = a.areas + number % 2 * a.members * AREA_BYTES
        if is_writer:
            if not wait_for(a, a.members, number, worker):
                return
            _memcpy(area + a.member * AREA_BYTES + first, a.x + offset + first, last - first)
            if worker == 0:
                note(a, WRITTEN, size)
            arrive(a, workers)
        if is_reader:
            if not wait_for(a, a.members if is_writer else 1, number + 1, worker):
                return
            read_areas(a, area, offset, first, last)
        if not is_writer:
            arrive(a, workers)
        number += 1


@cache
def _exchange_kernel() -> int:
    return compile_kernel(_exchange)


def group_bytes(members: int) -> int:
    return counter_bytes(members) + 2 * members * AREA_BYTES


def counter_bytes(members: int) -> int:
    return -(-members * MEMBER_BYTES // PAGE_BYTES) * PAGE_BYTES


def shared_bytes(parallelism: Parallelism) -> int:
    """The size of the memory for `SharedMemoryPeers`. What is not used of it, as the areas of a link's receiver, is never touched."""
    p = parallelism
    return PAGE_BYTES + p.pp * group_bytes(p.tp) + (p.pp - 1) * p.tp * group_bytes(2)


class _Group(NamedTuple):
    """A group as one member sees it. address: in the shared memory"""

    address: int
    member: int
    members: int
    first_rank: int
    rank_step: int
    max_wait_s: float


class SharedMemoryPeers:
    """Implements `Peers`. memory: zeros at first, at least `shared_bytes`, mapped by all ranks of the replica."""

    runs_only_kernels: ClassVar = True

    def __init__(self, memory: mmap, place: Place) -> None:
        p = place.parallelism
        self._words = np.frombuffer(memory, np.int64)
        assert self._words.nbytes >= shared_bytes(p), f"{self._words.nbytes} bytes, and {shared_bytes(p)} are needed"
        stages = self._words.ctypes.data + PAGE_BYTES
        links = stages + p.pp * group_bytes(p.tp)
        first_rank = place.rank - place.tp_rank
        self._stage = _Group(stages + place.stage * group_bytes(p.tp), place.tp_rank, p.tp, first_rank, 1, MAX_WAIT_S)

        def link(stage: int, member: int) -> _Group:
            """From a stage to the next one, whose ranks are lower."""
            sender = place.rank + member * p.tp
            return _Group(links + (stage * p.tp + place.tp_rank) * group_bytes(2), member, 2, sender, -p.tp, MAX_LINK_WAIT_S)

        self._place = place
        self._next = None if place.is_last else link(place.stage, 0)
        self._previous = None if place.is_first else link(place.stage - 1, 1)
        _exchange_kernel()  # compiled before another rank waits for this one

    def reduce(self, x: Tensor) -> Tensor:
        """In place; float32 or bfloat16, whose sums are made in float32 and rounded once."""
        if self._stage.members == 1:
            return x
        self._exchange(self._stage, SUMS[x.dtype], x, x)
        return x

    def gather(self, x: Tensor) -> Tensor:
        if self._stage.members == 1:
            return x
        rows = x.shape[0] if self._stage.member == 0 else 0
        out = allocate_result((rows, x.shape[1] * self._stage.members), x.dtype)
        self._exchange(self._stage, GATHER, x, out, row_bytes=x.shape[1] * x.itemsize)
        return out

    def broadcast(self, x: Tensor) -> None:
        if self._stage.members > 1:
            self._exchange(self._stage, MOVE, x, x)

    def send(self, x: Tensor) -> None:
        assert self._next is not None, "the last stage sends nothing"
        self._exchange(self._next, MOVE, x, x)

    def receive(self, x: Tensor) -> None:
        assert self._previous is not None, "the first stage receives nothing"
        self._exchange(self._previous, MOVE, x, x)

    def note_step(self, nanoseconds: int) -> None:
        self._words[LINE_BYTES // 8 * self._place.rank + STEPS_NS] += nanoseconds

    def work(self) -> list[RankWork]:
        return [self._work_of(self._place.parallelism.place(rank)) for rank in range(self._place.parallelism.world)]

    def _work_of(self, place: Place) -> RankWork:
        p, links = place.parallelism, PAGE_BYTES + place.parallelism.pp * group_bytes(place.parallelism.tp)
        own = [PAGE_BYTES + place.stage * group_bytes(p.tp) + MEMBER_BYTES * place.tp_rank]
        for stage, member in ((place.stage - 1, 1), (place.stage, 0)):
            if 0 <= stage < p.pp - 1:
                own.append(links + (stage * p.tp + place.tp_rank) * group_bytes(2) + MEMBER_BYTES * member)
        counted = [self._words[at // 8 :][: MEMBER_BYTES // 8].tolist() for at in own]
        second = LINE_BYTES // 8
        stage_waited, *link_waited = (words[second + WAITED] for words in counted)
        return RankWork(
            num_exchanges=sum(words[0] for words in counted),
            num_bytes=sum(words[second + WRITTEN] for words in counted),
            waited_s=(stage_waited + sum(link_waited)) / 1e9,
            link_waited_s=sum(link_waited) / 1e9,
            steps_s=int(self._words[second * place.rank + STEPS_NS]) / 1e9,
        )

    def abort(self) -> None:
        self._words[0] = self._words[0] or ABORTED

    def close(self) -> None:
        self.abort()

    def _exchange(self, group: _Group, operation: int, x: Tensor, out: Tensor, *, row_bytes: int = 0) -> None:
        """Inside a launch list the exchange comes later: then an aborted one is found by the next one outside of a list."""
        assert x.is_contiguous(), f"ranks exchange contiguous tensors, got strides {x.stride()}"
        arguments = ExchangeArguments(
            operation=operation,
            x=x.data_ptr(),
            out=out.data_ptr(),
            num_bytes=x.nbytes,
            row_bytes=row_bytes,
            group=group.address,
            areas=group.address + counter_bytes(group.members),
            member=group.member,
            members=group.members,
            abort=self._words.ctypes.data,
            limit_ns=int(group.max_wait_s * 1e9),
            first_rank=group.first_rank,
            rank_step=group.rank_step,
        )
        with deferred_launches():  # a list runs with fewer workers where not all of them start
            launch(_exchange_kernel(), arguments, workers_for(x.nbytes // 4), out, x, self._words)
        self._check()

    def _check(self) -> None:
        word = int(self._words[0])
        if word >= LATE:
            raise EngineFatal(f"rank {word - LATE} was waited for too long by another rank of this replica")
        if word == ABORTED:
            raise EngineFatal("another rank of this replica has ended, and no rank goes on without it")
