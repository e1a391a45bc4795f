"""Capture and replay of kernel launches, as CUDA graphs do it: many kernels run in one parallel region."""

from __future__ import annotations

from array import array
from collections.abc import Callable, Hashable, Iterator, Sequence
from contextlib import contextmanager
from functools import cache
from typing import Any, NamedTuple, TypeVar, cast

import numpy as np
import torch
from numba import types
from torch import Tensor

from headrace.core.errors import EngineFatal
from headrace.tensor.kernels.cpu.jit.launch import CALLER, address_of, call, compile_kernel, guarded, helper, run_now, words
from headrace.tensor.kernels.cpu.jit.scalars import (
    as_i64,
    at,
    compare_and_set,
    increment,
    load_acquire,
    monotonic_ns,
    pause,
    read_arguments,
)

_Made = TypeVar("_Made")
_Update = TypeVar("_Update", bound="Callable[[RecordedLaunches], bool]")

BASE_SPINS = 1 << 16
"""Spins, of 50 ns or more each, that a worker waits for the others to start, before the spins per kernel are added."""
SPINS_PER_KERNEL = 1 << 11
"""The worker that gives up runs all kernels by itself, so it waits about as long as that takes."""
MAX_SPINS = 1 << 18
SPINS_BEFORE_YIELD = 1 << 12
MAX_WAIT_S = 60.0
"""Longest wait at a barrier between two kernels; after that running the list ends in EngineFatal."""
MAX_CLOCK_GAP_NS = 1_000_000_000
"""The most that one gap between two clock readings adds to a waiting time: a longer gap means that the process was suspended."""
MAX_RESULT_BYTES = 32 << 20
"""A list is run early once its results take more bytes; a recording whose list was run early cannot be replayed."""
sched_yield = types.ExternalFunction("sched_yield", types.int32())
STARTED_WORKERS, TEAM_CHOICE, BARRIER_ARRIVALS, TIMED_OUT, NUM_STATE_WORDS = range(5)
"""Words of a list's state, all 0 at first: the number of workers that started; 1 once the team is all workers, 2 + worker once this worker
runs the list by itself; arrivals at all barriers so far; 1 once a worker waited too long."""


@helper
def waited_more(waited_ns: int, last_ns: int, now_ns: int) -> int:
    return waited_ns if last_ns == 0 else waited_ns + min(now_ns - last_ns, MAX_CLOCK_GAP_NS)


@helper
def wait_at_barrier(state: Any, value: int, limit_ns: int) -> bool:
    """True once `value` arrivals are counted; False once any worker has waited limit_ns.

    The worker yields its processor now and then, since it may hold up the worker that it waits for.
    """
    spins, last, waited = 0, 0, 0
    while load_acquire(at(state, BARRIER_ARRIVALS)) < value:
        pause()
        spins += 1
        if spins % SPINS_BEFORE_YIELD == 0:
            sched_yield()
            now = monotonic_ns()
            waited, last = waited_more(waited, last, now), now
            if waited > limit_ns:
                compare_and_set(at(state, TIMED_OUT), 1)
            if load_acquire(at(state, TIMED_OUT)) != 0:
                return False
    return True


@helper
def gather_workers(state: Any, worker: int, workers: int, max_spins: int) -> int:
    """The team size this worker runs with: `workers` if all started in time; else 1 for the worker that claims the list, 0 for the rest."""
    increment(at(state, STARTED_WORKERS))
    spins = 0
    while load_acquire(at(state, STARTED_WORKERS)) < workers and load_acquire(at(state, TEAM_CHOICE)) == 0 and spins < max_spins:
        pause()
        spins += 1
        if spins % SPINS_BEFORE_YIELD == 0:
            sched_yield()
    choice = compare_and_set(at(state, TEAM_CHOICE), 1 if load_acquire(at(state, STARTED_WORKERS)) >= workers else 2 + worker)
    if choice == 1:
        return workers
    return 1 if choice == 2 + worker else 0


class ListArguments(NamedTuple):
    """entries: `LaunchEntry`, one behind the other."""

    entries: int
    num_entries: int
    state: int
    limit_ns: int


class LaunchEntry(NamedTuple):
    """workers: 0 passes the kernel over; `RecordedLaunches.set_workers` may change that."""

    kernel: int
    arguments: int
    workers: int


ENTRY_WORDS = len(LaunchEntry._fields)
WORKERS = LaunchEntry._fields.index("workers")


def _run_list(arguments: int, worker: int, workers: int) -> None:
    a: ListArguments = read_arguments(ListArguments, arguments)
    state = as_i64(a.state)
    max_spins = min(BASE_SPINS + SPINS_PER_KERNEL * a.num_entries, MAX_SPINS)
    team = workers if workers == 1 else gather_workers(state, worker, workers, max_spins)
    rank, arrivals, before = (0 if team == 1 else worker), 0, 0
    if team == 0:
        return
    for index in range(a.num_entries):
        each: LaunchEntry = read_arguments(LaunchEntry, a.entries + 8 * ENTRY_WORDS * index)
        if each.workers == 0:
            continue
        needed = min(each.workers, team)
        if index > 0 and max(needed, before) > 1:  # consecutive kernels of one worker need no barrier
            arrivals += team
            increment(at(state, BARRIER_ARRIVALS))
            if not wait_at_barrier(state, arrivals, a.limit_ns):
                return
        if rank < needed:
            call(each.kernel, each.arguments, rank, needed)
        before = needed


class LaunchList:
    def __init__(self) -> None:
        self._made: tuple[list[Tensor], list[Tensor]] | None = None
        self._layer = self._place = 0
        self._clear()

    def _clear(self) -> None:
        """The layers' results stay: callers may still hold these tensors, and the next layers write into them."""
        self.entries: list[int] = []
        self.workers = 1
        self.kept: list[object] = []
        self.kept_bytes = 0
        self.known: dict[Hashable, object] = {}

    def add(self, kernel: int, memory: array[int], workers: int, touched: tuple[Tensor | np.ndarray, ...]) -> None:
        self.entries += LaunchEntry(kernel=kernel, arguments=address_of(memory), workers=workers)
        self.workers = max(self.workers, workers)
        self.kept += (memory, touched)
        if self.kept_bytes > MAX_RESULT_BYTES:
            self.run_pending()

    def register_counter(self, memory: array[int]) -> None:
        pass  # this list runs once, and its counters are new

    def next_layer(self) -> None:
        if self._made is None:
            self._made = [], []
        self._layer, self._place = 1 - self._layer, 0

    def allocate_result(self, shape: Sequence[int], dtype: torch.dtype) -> Tensor:
        """In layer n, the result allocated at the same place in layer n - 2, if its shape and dtype are these; else a new tensor. Kernels
        that use the old values were launched earlier, so they run before the kernels that write the new ones."""
        if self._made is None:
            return self._new(shape, dtype)
        made, place = self._made[self._layer], self._place
        self._place += 1
        if place < len(made) and made[place].dtype == dtype and made[place].shape == tuple(shape):
            return made[place]
        made[place : place + 1] = [self._new(shape, dtype)]
        return made[place]

    def _new(self, shape: Sequence[int], dtype: torch.dtype) -> Tensor:
        made = torch.empty(shape, dtype=dtype)
        self.kept_bytes += made.nbytes
        return made

    def run_pending(self) -> None:
        if self.entries:
            run_list(words(self.entries), self.workers)
        self._clear()


class RecordedLaunches(LaunchList):
    """`is_whole` is False where a result was read while recording, or results exceeded MAX_RESULT_BYTES."""

    def __init__(self) -> None:
        super().__init__()
        self.is_whole = True
        self._list = words(())
        self._counters: list[array[int]] = []
        self._updates: dict[Hashable, Callable[[RecordedLaunches], bool]] = {}

    def register_counter(self, memory: array[int]) -> None:
        self._counters.append(memory)

    def run_pending(self) -> None:
        self.is_whole = False
        super().run_pending()

    def argument_update(self, key: Hashable, make: Callable[[], _Update]) -> _Update:
        """The function, made once per key, that updates arguments before each replay; it returns False if the step needs another list."""
        if key not in self._updates:
            self._updates[key] = make()
        return cast("_Update", self._updates[key])

    @property
    def num_entries(self) -> int:
        return len(self.entries) // ENTRY_WORDS

    def set_workers(self, entry: int, workers: int) -> None:
        self._list[ENTRY_WORDS * entry + WORKERS] = workers
        self.workers = max(self.workers, workers)

    def seal_and_run(self) -> None:
        self._list = words(self.entries)
        run_list(self._list, self.workers)

    def replay(self) -> bool:
        if not all(update(self) for update in self._updates.values()):
            return False
        self.replay_as_is()
        return True

    def replay_as_is(self) -> None:
        self.reset_counters()
        run_list(self._list, self.workers)

    def reset_counters(self) -> None:
        for memory in self._counters:
            memory[-1] = 0

    def entries_of(self, kernel: int) -> array[int]:
        """For benchmarks: running them corrupts the step's results."""
        entries = self._list
        firsts = (first for first in range(0, len(entries), ENTRY_WORDS) if entries[first] == kernel)
        return words(word for first in firsts for word in entries[first : first + ENTRY_WORDS])


def run_list(entries: array[int], workers: int) -> None:
    """Raises EngineFatal if a worker waited MAX_WAIT_S at a barrier: results are then incomplete. A worker that never returns from its
    kernel blocks this call; only monitoring from outside can detect that."""
    state = words([0] * NUM_STATE_WORDS)
    arguments = ListArguments(
        entries=address_of(entries), num_entries=len(entries) // ENTRY_WORDS, state=address_of(state), limit_ns=int(MAX_WAIT_S * 1e9)
    )
    memory = words(arguments)
    guarded(run_now, _list_kernel(), address_of(memory), workers)
    if state[TIMED_OUT]:
        raise EngineFatal(f"kernel threads waited {MAX_WAIT_S:g} s for one of them in the middle of a step, and gave up")


@cache
def _list_kernel() -> int:
    return compile_kernel(_run_list)


@contextmanager
def deferred_launches() -> Iterator[None]:
    """Kernels launched inside run at its end, in order, in one parallel region. An inner block joins the outer one.

    Call `run_pending` before a result is read inside. After an exception the launches still pending are dropped.
    """
    if CALLER.pending is not None:
        yield
        return
    CALLER.pending = batched = LaunchList()
    try:
        yield
        batched.run_pending()
    finally:
        CALLER.pending = None


@contextmanager
def recording() -> Iterator[RecordedLaunches]:
    """The list can be replayed if it `is_whole` at the end. Raises RuntimeError when nested."""
    if CALLER.pending is not None:
        raise RuntimeError("kernels are being recorded or put together already")
    CALLER.pending = recorded = RecordedLaunches()
    try:
        yield recorded
        recorded.seal_and_run()
    finally:
        CALLER.pending = None


def next_layer() -> None:
    """From here on results reuse the buffers of layer n - 2: layer n reads only its own results and those of layer n - 1, and buffers for
    two layers fit the caches. Outside `deferred_launches` this does nothing."""
    if isinstance(CALLER.pending, LaunchList):
        CALLER.pending.next_layer()


def current_recording() -> RecordedLaunches | None:
    return CALLER.pending if isinstance(CALLER.pending, RecordedLaunches) else None


def cached_in_step(key: Hashable, make: Callable[[], _Made]) -> _Made:
    """Call `make`; inside `deferred_launches` and `recording`, at most once per key until the list is run. Its inputs must not change
    meanwhile; the key holds their addresses."""
    pending = CALLER.pending
    if not isinstance(pending, LaunchList):
        return make()
    if key not in pending.known:
        pending.known[key] = make()
    return cast("_Made", pending.known[key])


def run_pending() -> None:
    if isinstance(CALLER.pending, LaunchList):
        CALLER.pending.run_pending()
