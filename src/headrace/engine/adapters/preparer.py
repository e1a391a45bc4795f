"""Prepares the adapters of requests (a `Preparer`), on its own thread while others are served.

Which adapters have places is decided in `policy.adapter_places`.
"""

from __future__ import annotations

import logging
import queue
import threading
import time
from collections import Counter
from collections.abc import Collection, Iterable, Mapping, Sequence
from typing import Generic, NamedTuple, Protocol

from headrace.core.adapters import AdapterSource
from headrace.core.clock import Clock
from headrace.core.errors import CheckpointError, Unavailable
from headrace.core.ids import PreparationId
from headrace.core.request import EngineRequest
from headrace.engine.adapters.catalogue import AdapterCatalogue
from headrace.engine.adapters.folders import AdapterFolders, LoadsAdapters
from headrace.engine.adapters.pool import AdapterPool, Weights
from headrace.policy.adapter_places import AdapterPlaces, Granted, PlaceTurn

log = logging.getLogger(__name__)

ADAPTER = "adapter"

READ_TIMEOUT_S = 60.0
"""For each adapter that is read before, and for its own."""

MAX_NAMES = 64

HOLDERS_PER_RUNNING = 2
"""A batch that runs, and one that is ready to: more would only wait in the queue with their places."""


class AdapterEngine(Protocol):
    """Its methods may be called on any thread."""

    def satisfied(self, preparation_id: PreparationId, what: str, adapter_slot: int) -> None: ...

    def failed(self, preparation_id: PreparationId, what: str, error: Exception) -> None: ...


class AdapterUse(NamedTuple):
    """Names of adapters that unfinished requests use, and of those that requests wait for, at most MAX_NAMES of each."""

    running: tuple[str, ...] = ()
    waiting: tuple[str, ...] = ()


class AdapterReads(NamedTuple):
    """Reads of adapters since the engine started, and the pool that they go to. read_s: of those that succeeded"""

    num: int = 0
    read_s: float = 0.0
    num_failed: int = 0
    num_evicted: int = 0
    pool_bytes: int = 0
    pool_highest_bytes: int = 0


class AdapterPreparer(Generic[Weights]):
    """
    max_loras      places: adapters that unfinished requests use at once
    max_cpu_loras  adapters on the host, at least max_loras
    max_num_seqs   sequences that run at once
    """

    def __init__(
        self, loader: LoadsAdapters[Weights], *, max_loras: int, max_cpu_loras: int, max_num_seqs: int, clock: Clock = time.monotonic
    ) -> None:
        self.max_loras = max_loras
        self._folders = AdapterFolders[Weights](loader)
        self._catalogue = AdapterCatalogue(self._folders)
        self._pool = AdapterPool[Weights](max_cpu_loras, loader.max_bytes)
        self._places = AdapterPlaces(max_loras, HOLDERS_PER_RUNNING * max_num_seqs)
        self._clock = clock
        self._engine: AdapterEngine | None = None
        self._lock = threading.Lock()
        self._open: dict[PreparationId, EngineRequest] = {}
        self._reading: dict[str, dict[PreparationId, int]] = {}  # digest -> those that have its place and wait until it is read
        self._reads: queue.SimpleQueue[str | None] = queue.SimpleQueue()
        self._thread: threading.Thread | None = None
        self._resident: tuple[Weights | None, ...] = (None,) * (max_loras + 1)
        self._running: Counter[str] = Counter()
        self._waiting: Counter[str] = Counter()
        self._use: AdapterUse | None = AdapterUse()
        self.reads_done = AdapterReads()  # replaced as a whole: whoever reads it takes no lock from the thread that reads adapters

    def attach(self, engine: AdapterEngine) -> None:
        self._engine = engine

    # on any thread

    @property
    def digests(self) -> dict[str, str]:
        return self._catalogue.digests

    def resident(self) -> tuple[Weights | None, ...]:
        """The weights by place. None: entry 0, and a place whose adapter is not read yet, which no row names."""
        return self._resident

    def set(self, sources: Sequence[AdapterSource], changed: Collection[str] | None = None) -> None:
        """As `AdapterCatalogue.set`. Requests that run keep their weights; those that wait for an adapter that is gone are refused."""
        self._catalogue.set(sources, changed)
        with self._lock:
            waiting = [(each, request) for each, request in self._open.items() if self._is_waiting(each, request)]
        for preparation_id, request in waiting:
            try:
                self._catalogue.check(request)
            except Unavailable as error:
                self._attached.failed(preparation_id, ADAPTER, error)

    def put_first(self, weights: Weights) -> None:
        """Into the first place, until an adapter is granted it: for steps that are made up."""
        self._resident = (None, weights, *self._resident[2:])

    def _is_waiting(self, preparation_id: PreparationId, request: EngineRequest) -> bool:
        return self._places.is_waiting(preparation_id) or preparation_id in self._reading.get(request.adapter_digest, ())

    @property
    def _attached(self) -> AdapterEngine:
        assert self._engine is not None, "attach comes first"
        return self._engine

    # on the loop's thread

    def begin(self, request: EngineRequest, preparation_id: PreparationId) -> Mapping[str, float]:
        """Where the weights are there, the engine hears of their place at once, in its inbox."""
        if request.adapter is None:
            return {}
        with self._lock:
            self._catalogue.check(request)
            now = self._clock()
            place = self._places.ask(preparation_id, request.adapter_digest, PlaceTurn(request.priority, request.tenant), now)
            self._open[preparation_id] = request
            self._count(request, 1, is_running=place is not None)
            limit_s = READ_TIMEOUT_S * (1 + len(self._reading))
            if place is None:
                return {ADAPTER: limit_s + self._places.wait_limit_s(now)}
            self._hand_over([Granted(place, request.adapter_digest, preparation_id)])
        return {ADAPTER: limit_s}

    def end(self, preparation_id: PreparationId) -> None:
        with self._lock:
            if (request := self._open.pop(preparation_id, None)) is None:
                return
            self._count(request, -1, is_running=not self._places.is_waiting(preparation_id))
            self._reading.get(request.adapter_digest, {}).pop(preparation_id, None)
            granted = self._places.end(preparation_id, self._clock())
            for each in granted:
                self._count(self._open[each.holder], -1, is_running=False)
                self._count(self._open[each.holder], 1, is_running=True)
            self._hand_over(granted)

    def close(self) -> None:
        self._reads.put(None)

    @property
    def use(self) -> AdapterUse:
        with self._lock:
            if self._use is None:
                self._use = AdapterUse(_names(self._running), _names(self._waiting))
            return self._use

    def check(self) -> None:
        with self._lock:
            self._places.check()
            self._pool.check()
            self._folders.check()
            assert sum(self._running.values()) + sum(self._waiting.values()) == len(self._open)
            assert all(self._places.has(digest) or not waiting for digest, waiting in self._reading.items())

    def _count(self, request: EngineRequest, change: int, *, is_running: bool) -> None:
        names = self._running if is_running else self._waiting
        names[str(request.adapter)] += change
        if not names[str(request.adapter)]:
            del names[str(request.adapter)]
        self._use = None

    def _hand_over(self, granted: Iterable[Granted]) -> None:
        for place, digest, holder in granted:
            if digest in self._reading:
                self._reading[digest][holder] = place
            elif digest in self._pool:
                self._pool.use(digest)
                if self._resident[place] is not self._pool.get(digest):
                    self._renew_resident()
                self._attached.satisfied(holder, ADAPTER, place)
            else:
                self._reading[digest] = {holder: place}
                self._read_soon(digest)

    def _read_soon(self, digest: str) -> None:
        self._reads.put(digest)
        if self._thread is None:
            self._thread = threading.Thread(target=self._work, name="headrace-adapters", daemon=True)
            self._thread.start()

    def _renew_resident(self) -> None:
        weights = (None if digest is None else self._pool.get(digest) for digest in self._places.adapters)
        self._resident = (None, *weights)

    # on its own thread

    def _work(self) -> None:
        while (digest := self._reads.get()) is not None:
            with self._lock:
                if not self._reading[digest]:  # its requests ended while it waited
                    del self._reading[digest]
                    continue
                self._renew_resident()
                self._pool.make_room(self._places.adapters)
            began = self._clock()
            try:
                weights = self._read(digest)
            except Exception as error:  # the outermost border of this thread: the loop logs what is not ours
                self._fail(digest, error)
            else:
                self._take_in(digest, weights, self._clock() - began)

    def _read(self, digest: str) -> Weights:
        if (source := self._catalogue.source(digest)) is None:
            raise Unavailable("the adapter has been taken off this engine")
        try:
            return self._folders.load(source, digest)
        except CheckpointError as error:
            log.error("an adapter cannot be used: %s", error)
            raise Unavailable(f"the adapter cannot be used: {error.reason}") from error

    def _fail(self, digest: str, error: Exception) -> None:
        with self._lock:
            waiting = self._reading.pop(digest)
            self._note_read(num_failed=1)
        for preparation_id in waiting:
            self._attached.failed(preparation_id, ADAPTER, error)

    def _take_in(self, digest: str, weights: Weights, read_s: float) -> None:
        with self._lock:
            waiting = self._reading.pop(digest)
            if self._places.has(digest):  # else its place was given on meanwhile, and no request waits
                self._pool.add(digest, weights)
            self._note_read(num=1, read_s=read_s)
            self._renew_resident()
            for preparation_id, place in waiting.items():
                self._attached.satisfied(preparation_id, ADAPTER, place)

    def _note_read(self, *, num: int = 0, read_s: float = 0.0, num_failed: int = 0) -> None:
        done, pool = self.reads_done, self._pool
        self.reads_done = AdapterReads(
            done.num + num, done.read_s + read_s, done.num_failed + num_failed, pool.num_evicted, pool.num_bytes, pool.highest_bytes
        )


def _names(counts: Counter[str]) -> tuple[str, ...]:
    return tuple(sorted(counts)[:MAX_NAMES])
