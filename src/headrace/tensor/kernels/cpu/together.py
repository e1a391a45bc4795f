"""Many kernels in one parallel region, and steps that are recorded once and run again.

`together` puts launches on a list; `recording` keeps that list, with all the memory it names, so that a later step of the same shape is
one call: its inputs are written where the first one's lay, and no Python runs per kernel.
"""

from __future__ import annotations

import time
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
from headrace.tensor.kernels.cpu.jit.simd import as_i64, at, compare_and_set, increment, load, load_acquire, pause, read_arguments

_Made = TypeVar("_Made")
_Renewal = TypeVar("_Renewal", bound="Callable[[RecordedLaunches], bool]")

BASE_SPINS = 1 << 16
"""Waiting rounds, of some 50 ns and more, after which a worker no longer expects the others."""
SPINS_PER_KERNEL = 1 << 11
"""So many more for each kernel on the list: who gives up does all of them alone, and may wait for about as long as that would take."""
MOST_SPINS = 1 << 18
SPINS_BEFORE_YIELD = 1 << 12
MOST_WAIT_S = 60.0
"""A worker waits so long for the others in the middle of a list, where a kernel takes milliseconds; then the list is given up."""
MAX_CLOCK_GAP_NS = 1_000_000_000
"""Between two looks at the clock, what counts as waiting: more than that, and the process itself was stopped, its workers with it."""
MOST_KEPT_BYTES = 32 << 20
"""Of the memory that a list holds before it is run, and most that one recording holds."""
_yield = types.ExternalFunction("sched_yield", types.int32())
_clock_gettime = types.ExternalFunction("clock_gettime", types.int32(types.int32, types.intp))
_CLOCK = time.CLOCK_MONOTONIC
ARRIVED, VERDICT, PASSED, TIMED_OUT, CLOCKS = 0, 1, 2, 3, 4
"""Places in a list's state; from CLOCKS on, two numbers per worker to read the time into."""


@helper
def read_ns(place: int) -> int:
    """The monotonic clock, by way of two numbers at the address `place`."""
    _clock_gettime(_CLOCK, place)
    clock = as_i64(place)
    return int(load(clock, 0) * 1_000_000_000 + load(clock, 1))


@helper
def waited_more(waited_ns: int, last_ns: int, now_ns: int) -> int:
    """What has been waited by now, for a worker that last looked at the clock at last_ns (0: this is its first look)."""
    return waited_ns if last_ns == 0 else waited_ns + min(now_ns - last_ns, MAX_CLOCK_GAP_NS)


@helper
def wait_until(state: Any, value: int, clock: int, limit_ns: int) -> bool:
    """Until all have passed, or, which is False, until a worker has waited for limit_ns. clock: see `read_ns`.

    The processor is left to others now and then: a worker that waits may hold up the one it waits for.
    """
    spins, last, waited = 0, 0, 0
    while load_acquire(at(state, PASSED)) < value:
        pause()
        spins += 1
        if spins % SPINS_BEFORE_YIELD == 0:
            _yield()
            now = read_ns(clock)
            waited, last = waited_more(waited, last, now), now
            if waited > limit_ns:
                compare_and_set(at(state, TIMED_OUT), 1)
            if load_acquire(at(state, TIMED_OUT)) != 0:
                return False
    return True


@helper
def gather_workers(state: Any, worker: int, workers: int, max_spins: int) -> int:
    """How many workers there are: all of them when they came together in time; else the one that gave up is alone, the others are 0."""
    increment(at(state, ARRIVED))
    spins = 0
    while load_acquire(at(state, ARRIVED)) < workers and load_acquire(at(state, VERDICT)) == 0 and spins < max_spins:
        pause()
        spins += 1
        if spins % SPINS_BEFORE_YIELD == 0:
            _yield()
    verdict = compare_and_set(at(state, VERDICT), 1 if load_acquire(at(state, ARRIVED)) >= workers else 2 + worker)
    if verdict == 1:
        return workers
    return 1 if verdict == 2 + worker else 0


class ListArguments(NamedTuple):
    """Arguments of the kernel that runs a list. entries (`Entry`, one behind the other) and state are addresses."""

    entries: int
    num_entries: int
    state: int
    limit_ns: int


class Entry(NamedTuple):
    """An entry of a list: the kernel's address, its arguments' address, and its workers."""

    kernel: int
    arguments: int
    workers: int


ENTRY_WORDS = len(Entry._fields)
WORKERS = Entry._fields.index("workers")


def _run_list(arguments: int, worker: int, workers: int) -> None:
    """Run the kernels one after the other; between two of them every worker waits for all."""
    a: ListArguments = read_arguments(ListArguments, arguments)
    state, clock = as_i64(a.state), a.state + 8 * (CLOCKS + 2 * worker)
    max_spins = min(BASE_SPINS + SPINS_PER_KERNEL * a.num_entries, MOST_SPINS)
    team = workers if workers == 1 else gather_workers(state, worker, workers, max_spins)
    rank, passed, before = (0 if team == 1 else worker), 0, 0
    if team == 0:
        return
    for index in range(a.num_entries):
        each: Entry = read_arguments(Entry, a.entries + 8 * ENTRY_WORDS * index)
        needed = min(each.workers, team)
        if index > 0 and max(needed, before) > 1:  # consecutive kernels of one worker need no barrier
            passed += team
            increment(at(state, PASSED))
            if not wait_until(state, passed, clock, a.limit_ns):
                return
        if rank < needed:
            call(each.kernel, each.arguments, rank, needed)
        before = needed


class LaunchList:
    """Kernels asked for and not run yet, with all they touch."""

    def __init__(self) -> None:
        self._made: tuple[list[Tensor], list[Tensor]] | None = None
        self._layer = self._place = 0
        self._clear()

    def _clear(self) -> None:
        """What has been made for layers stays: who asked may still hold it, and the next layers write into it."""
        self.entries: list[int] = []
        self.workers = 1
        self.kept: list[object] = []
        self.kept_bytes = 0
        self.known: dict[Hashable, object] = {}

    def add(self, kernel: int, memory: array[int], workers: int, touched: tuple[Tensor | np.ndarray, ...]) -> None:
        self.entries += Entry(kernel=kernel, arguments=address_of(memory), workers=workers)
        self.workers = max(self.workers, workers)
        self.kept += (memory, touched)
        if self.kept_bytes > MOST_KEPT_BYTES:
            self.run_pending()

    def counted(self, memory: array[int]) -> None:
        pass  # used once, and new

    def next_layer(self) -> None:
        if self._made is None:
            self._made = [], []
        self._layer, self._place = 1 - self._layer, 0

    def fresh(self, shape: Sequence[int], dtype: torch.dtype) -> Tensor:
        """The tensor that was made at the same place of the layer before the last, if it is of this kind.

        The kernels that use it run before those that are asked for now, in whatever list they stand.
        """
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
        """Run what is on the list."""
        if self.entries:
            run_list(words(self.entries), self.workers)
        self._clear()


class RecordedLaunches(LaunchList):
    """A list that can be run again. Not where something had to be looked at in between, or where it holds too much memory."""

    def __init__(self) -> None:
        super().__init__()
        self.is_whole = True
        self._list = words(())
        self._counters: list[array[int]] = []
        self._renewals: dict[Hashable, Callable[[RecordedLaunches], bool]] = {}

    def counted(self, memory: array[int]) -> None:
        self._counters.append(memory)

    def run_pending(self) -> None:
        self.is_whole = False
        super().run_pending()

    def renewal(self, key: Hashable, make: Callable[[], _Renewal]) -> _Renewal:
        """What is called before the list is run again, made once per key: it brings arguments up to date, or says that it cannot."""
        if key not in self._renewals:
            self._renewals[key] = make()
        return cast("_Renewal", self._renewals[key])

    @property
    def num_entries(self) -> int:
        return len(self.entries) // ENTRY_WORDS

    def set_workers(self, entry: int, workers: int) -> None:
        self._list[ENTRY_WORDS * entry + WORKERS] = workers
        self.workers = max(self.workers, workers)

    def finish(self) -> None:
        """The first run."""
        self._list = words(self.entries)
        run_list(self._list, self.workers)

    def repeat(self) -> bool:
        """Run the list over what its inputs hold now. False, and nothing has been run, where this step is of another kind."""
        if not all(renew(self) for renew in self._renewals.values()):
            return False
        self.run()
        return True

    def run(self) -> None:
        self.rewind()
        run_list(self._list, self.workers)

    def rewind(self) -> None:
        """Set the kernels' counters to where each run begins."""
        for memory in self._counters:
            memory[-1] = 0

    def entries_of(self, kernel: int) -> array[int]:
        """The list without all other kernels, for those who measure: what this leaves behind is no step's result."""
        entries = self._list
        firsts = (first for first in range(0, len(entries), ENTRY_WORDS) if entries[first] == kernel)
        return words(word for first in firsts for word in entries[first : first + ENTRY_WORDS])


def run_list(entries: array[int], workers: int) -> None:
    """Raises EngineFatal where a worker did not come to the end of an entry in MOST_WAIT_S: results are incomplete, memory half written.

    Who never comes back from its kernel keeps the parallel region open, and this call with it: that is for those to see who watch the
    loop from outside.
    """
    state = words([0] * (CLOCKS + 2 * workers))
    arguments = ListArguments(
        entries=address_of(entries), num_entries=len(entries) // ENTRY_WORDS, state=address_of(state), limit_ns=int(MOST_WAIT_S * 1e9)
    )
    memory = words(arguments)
    guarded(run_now, _list_kernel(), address_of(memory), workers)
    if state[TIMED_OUT]:
        raise EngineFatal(f"kernel threads waited {MOST_WAIT_S:g} s for one of them in the middle of a step, and gave up")


@cache
def _list_kernel() -> int:
    return compile_kernel(_run_list)


@contextmanager
def together() -> Iterator[None]:
    """Kernels launched inside run at its end, in order, in one parallel region: no thread is woken per kernel, and Python is done before
    the weights drive it out of the caches. `run_pending` comes before a look at a result inside. After an exception nothing is run."""
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
    """`together`, and what is yielded can be run again if it `is_whole` in the end. Not to be nested."""
    if CALLER.pending is not None:
        raise RuntimeError("kernels are being recorded or put together already")
    CALLER.pending = recorded = RecordedLaunches()
    try:
        yield recorded
        recorded.finish()
    finally:
        CALLER.pending = None


def next_layer() -> None:
    """A layer begins, which reads results of the last one only: what is made inside `together` from here on may take the memory of those
    before. A step's results are then as large as two layers', which caches hold, and not as all. Elsewhere nothing changes."""
    if isinstance(CALLER.pending, LaunchList):
        CALLER.pending.next_layer()


def current_recording() -> RecordedLaunches | None:
    return CALLER.pending if isinstance(CALLER.pending, RecordedLaunches) else None


def once(key: Hashable, make: Callable[[], _Made]) -> _Made:
    """What `make` gives; inside `together`, made once per key: of tensors that nobody changes meanwhile, named by their addresses."""
    pending = CALLER.pending
    if not isinstance(pending, LaunchList):
        return make()
    if key not in pending.known:
        pending.known[key] = make()
    return cast("_Made", pending.known[key])


def run_pending() -> None:
    """Run what has been asked for so far inside `together`; elsewhere nothing is ever left to do."""
    if isinstance(CALLER.pending, LaunchList):
        CALLER.pending.run_pending()
