"""Runs all ranks of a replica in one process, each on a thread, with peers in plain torch: the twin of those that are processes.

One rank computes at a time, whoever waits for another lets it: kernels need not be callable from several threads at once.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from queue import SimpleQueue
from typing import Any

import torch
from torch import Tensor

from headrace.core.parallelism import Parallelism, Place
from headrace.tensor.models import LoadedModel
from headrace.tensor.peers import NoPeers

PATIENCE_S = 60


class Replica:
    """What the ranks share."""

    def __init__(self, parallelism: Parallelism) -> None:
        tp = parallelism.tp
        self.turn = threading.Lock()
        self.barriers = [threading.Barrier(tp, timeout=PATIENCE_S) for _ in range(parallelism.pp)]
        self.parts: list[list[Tensor]] = [[torch.empty(0)] * tp for _ in range(parallelism.pp)]
        self.sent: list[list[SimpleQueue[Tensor]]] = [[SimpleQueue() for _ in range(tp)] for _ in range(parallelism.pp)]


class TorchPeers(NoPeers):
    def __init__(self, replica: Replica, place: Place) -> None:
        self._replica, self._place = replica, place

    def reduce(self, x: Tensor) -> Tensor:
        first, *others = self._all(x)
        total = first.clone()
        for part in others:
            total += part
        return total

    def gather(self, x: Tensor) -> Tensor:
        whole = torch.cat(self._all(x), dim=1)
        return whole if self._place.tp_rank == 0 else whole[:0]

    def broadcast(self, x: Tensor) -> None:
        x.copy_(self._all(x)[0])

    def send(self, x: Tensor) -> None:
        self._replica.sent[self._place.stage + 1][self._place.tp_rank].put(x.clone())

    def receive(self, x: Tensor) -> None:
        with self._waiting():
            sent = self._replica.sent[self._place.stage][self._place.tp_rank].get(timeout=PATIENCE_S)
        assert (sent.shape, sent.dtype) == (x.shape, x.dtype)
        x.copy_(sent)

    def abort(self) -> None:
        for barrier in self._replica.barriers:
            barrier.abort()

    def _all(self, x: Tensor) -> list[Tensor]:
        barrier, parts = self._replica.barriers[self._place.stage], self._replica.parts[self._place.stage]
        parts[self._place.tp_rank] = x.clone()
        with self._waiting():
            barrier.wait()
        found = list(parts)
        with self._waiting():
            barrier.wait()
        assert {(part.shape, part.dtype) for part in found} == {(x.shape, x.dtype)}
        return found

    @contextmanager
    def _waiting(self) -> Iterator[None]:
        self._replica.turn.release()
        try:
            yield
        finally:
            self._replica.turn.acquire()


class Ranks:
    """All ranks of one replica, loaded. load: `load_model` but for `place` and `peers`."""

    def __init__(self, parallelism: Parallelism, load: Callable[..., LoadedModel]) -> None:
        self._replica = Replica(parallelism)
        places = [parallelism.place(rank) for rank in range(parallelism.world)]
        self._peers = [TorchPeers(self._replica, place) for place in places]
        self.loaded = [load(place=place, peers=peers) for place, peers in zip(places, self._peers, strict=True)]

    def run(self, compute: Callable[[LoadedModel], Any]) -> list[Any]:
        """What it returns on each rank."""

        def one(rank: int) -> Any:
            with self._replica.turn, torch.inference_mode():
                try:
                    return compute(self.loaded[rank])
                except BaseException:
                    self._peers[rank].abort()
                    raise

        with ThreadPoolExecutor(len(self.loaded)) as threads:
            return list(threads.map(one, range(len(self.loaded))))
