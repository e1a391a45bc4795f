"""Runs many kernels in one parallel region, and repeats the kernels of a recorded step.

`together` collects launches in a list and runs the list at its end: no thread is woken per kernel. `recording` keeps the list with all
memory that it names, so that a later step of the same shape is one call: its inputs are written to the same memory, and no Python runs
per kernel. Single launches: `jit.launch`. Users: `backend.NumbaExecutor`.
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
"""Rounds, of some 50 ns and more, that a worker waits for all workers to arrive before it runs a list of no kernels alone."""
SPINS_PER_KERNEL = 1 << 11
"""Additional rounds per kernel on the list. A worker that gives up runs all kernels alone, so it waits about as long as they would take."""
MOST_SPINS = 1 << 18
"""Limit of the rounds, however long the list is."""
SPINS_BEFORE_YIELD = 1 << 12
"""Rounds after which a waiting worker yields its processor once."""
MOST_WAIT_S = 60.0
"""Seconds that a worker waits for the other workers between two kernels of a list; after that the list ends in EngineFatal."""
MAX_CLOCK_GAP_NS = 1_000_000_000
"""Most nanoseconds between two readings of the clock that count as waiting: after a longer gap the whole process had been stopped."""
MOST_KEPT_BYTES = 32 << 20
"""Bytes of results that a list holds before it is run early. A recording that holds more is not whole."""
_yield = types.ExternalFunction("sched_yield", types.int32())
_clock_gettime = types.ExternalFunction("clock_gettime", types.int32(types.int32, types.intp))
_CLOCK = time.CLOCK_MONOTONIC
ARRIVED, VERDICT, PASSED, TIMED_OUT, CLOCKS = 0, 1, 2, 3, 4
"""Places in a list's state. From CLOCKS on there are two words per worker, into which it reads the clock."""


@helper
def read_ns(place: int) -> int:
    """The monotonic clock in nanoseconds. place: address of two words that are overwritten."""
    _clock_gettime(_CLOCK, place)
    clock = as_i64(place)
    return int(load(clock, 0) * 1_000_000_000 + load(clock, 1))


@helper
def waited_more(waited_ns: int, last_ns: int, now_ns: int) -> int:
    """Nanoseconds waited by now. last_ns: when the worker last read the clock; 0: this is its first reading."""
    return waited_ns if last_ns == 0 else waited_ns + min(now_ns - last_ns, MAX_CLOCK_GAP_NS)


@helper
def wait_until(state: Any, value: int, clock: int, limit_ns: int) -> bool:
    """Wait until `value` workers have passed. False: a worker has waited for limit_ns. clock: see `read_ns`.

    The worker yields its processor now and then, since it may hold up the worker that it waits for.
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
    """Wait for all workers to arrive. Returns `workers` if they did in time; else 1 for the worker that gave up first, 0 for the rest."""
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
    """Arguments of the kernel that runs a list. entries (`LaunchEntry`, one behind the other) and state are addresses."""

    entries: int
    num_entries: int
    state: int
    limit_ns: int


class LaunchEntry(NamedTuple):
    """An entry of a list: the kernel's address, its arguments' address, and its workers."""

    kernel: int
    arguments: int
    workers: int


ENTRY_WORDS = len(LaunchEntry._fields)
WORKERS = LaunchEntry._fields.index("workers")


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
        each: LaunchEntry = read_arguments(LaunchEntry, a.entries + 8 * ENTRY_WORDS * index)
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
    """Kernels that were launched and have not run yet, with all memory that they touch."""

    def __init__(self) -> None:
        self._made: tuple[list[Tensor], list[Tensor]] | None = None
        self._layer = self._place = 0
        self._clear()

    def _clear(self) -> None:
        """Empty the list. The layers' results stay: callers may still hold them, and the next layers write into them."""
        self.entries: list[int] = []
        self.workers = 1
        self.kept: list[object] = []
        self.kept_bytes = 0
        self.known: dict[Hashable, object] = {}

    def add(self, kernel: int, memory: array[int], workers: int, touched: tuple[Tensor | np.ndarray, ...]) -> None:
        self.entries += LaunchEntry(kernel=kernel, arguments=address_of(memory), workers=workers)
        self.workers = max(self.workers, workers)
        self.kept += (memory, touched)
        if self.kept_bytes > MOST_KEPT_BYTES:
            self.run_pending()

    def counted(self, memory: array[int]) -> None:
        pass  # this list runs once, and its counters are new

    def next_layer(self) -> None:
        if self._made is None:
            self._made = [], []
        self._layer, self._place = 1 - self._layer, 0

    def fresh(self, shape: Sequence[int], dtype: torch.dtype) -> Tensor:
        """The tensor that stood at the same place in the layer before the last, if its shape and dtype are these; else a new one.

        Kernels that use the old tensor were launched earlier, so they run before the kernels that write the new values.
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
        """Run the list, and empty it."""
        if self.entries:
            run_list(words(self.entries), self.workers)
        self._clear()


class RecordedLaunches(LaunchList):
    """A list that can be run again. `is_whole` is False if part of it had to run early: a result was read, or it held too much memory."""

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
        """A function called before the list is repeated, made once per key. It updates arguments; False: this step cannot be repeated."""
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
        """Run the list for the first time."""
        self._list = words(self.entries)
        run_list(self._list, self.workers)

    def repeat(self) -> bool:
        """Run the list over what its inputs hold now. False, with nothing run, where the step needs another list."""
        if not all(renew(self) for renew in self._renewals.values()):
            return False
        self.run()
        return True

    def run(self) -> None:
        self.rewind()
        run_list(self._list, self.workers)

    def rewind(self) -> None:
        """Set the kernels' counters to zero, as they are at the begin of a run."""
        for memory in self._counters:
            memory[-1] = 0

    def entries_of(self, kernel: int) -> array[int]:
        """The entries of one kernel, for measurements: running them does not compute a step's result."""
        entries = self._list
        firsts = (first for first in range(0, len(entries), ENTRY_WORDS) if entries[first] == kernel)
        return words(word for first in firsts for word in entries[first : first + ENTRY_WORDS])


def run_list(entries: array[int], workers: int) -> None:
    """Run a list's entries on `workers` threads.

    Raises EngineFatal where a worker did not finish an entry within MOST_WAIT_S: results are then incomplete. A kernel that never returns
    keeps the parallel region open, and this call does not return either; the watch on the engine's loop notices that.
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
    """Kernels launched inside run at its end, in order, in one parallel region.

    No thread is woken per kernel, and Python has finished before weights evict it from the caches. Call `run_pending` before a result is
    read inside. After an exception no pending kernel is run.
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
    """`together`, for a list that can be run again: it is yielded, and must be `is_whole` in the end. Raises RuntimeError when nested."""
    if CALLER.pending is not None:
        raise RuntimeError("kernels are being recorded or put together already")
    CALLER.pending = recorded = RecordedLaunches()
    try:
        yield recorded
        recorded.finish()
    finally:
        CALLER.pending = None


def next_layer() -> None:
    """A layer begins, which reads results of the previous layer only; outside `together` this does nothing.

    Results from here on may take the memory of the layer before the previous one. A step's results are then as large as those of two
    layers, which fit the caches.
    """
    if isinstance(CALLER.pending, LaunchList):
        CALLER.pending.next_layer()


def current_recording() -> RecordedLaunches | None:
    return CALLER.pending if isinstance(CALLER.pending, RecordedLaunches) else None


def once(key: Hashable, make: Callable[[], _Made]) -> _Made:
    """The result of `make`, which inside `together` is called once per key. The key names all that `make` reads, tensors by address."""
    pending = CALLER.pending
    if not isinstance(pending, LaunchList):
        return make()
    if key not in pending.known:
        pending.known[key] = make()
    return cast("_Made", pending.known[key])


def run_pending() -> None:
    """Run the kernels launched so far inside `together`; elsewhere none is pending."""
    if isinstance(CALLER.pending, LaunchList):
        CALLER.pending.run_pending()
