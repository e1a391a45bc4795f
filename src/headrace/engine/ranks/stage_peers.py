"""`Peers` for stages that are on machines of their own (`stages`)."""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import ClassVar

import numpy as np
import torch
from torch import Tensor

from headrace.core.errors import EngineFatal
from headrace.core.parallelism import Place, RankWork
from headrace.engine.ranks.frames import FrameKind, frame
from headrace.engine.ranks.link import RankLink
from headrace.tensor.peers import Peers

MAX_STAGE_WAIT_S = 600.0
"""As between stages of one machine: another one may have a whole step to compute."""


class StagePeers:
    """Implements `Peers`: a stage's own exchanges in shared memory, and hidden states over links to the stages before and after it.

    reports  what other ranks have done, as they say with each beat
    """

    runs_only_kernels: ClassVar = True

    def __init__(self, own: Peers, place: Place, previous: RankLink | None, following: RankLink | None) -> None:
        """previous, following: of a stage's first rank; owned by this object from now on"""
        self.reduce, self.gather, self.broadcast, self.note_step = own.reduce, own.gather, own.broadcast, own.note_step
        self.reports: dict[int, Sequence[int]] = {}
        self._own, self._place, self._previous, self._following = own, place, previous, following
        self._links = [link for link in (previous, following) if link is not None]
        self._num_frames = self._num_bytes = self._waited_ns = 0
        for link in self._links:
            link.wait_at_most(MAX_STAGE_WAIT_S)

    def send(self, x: Tensor) -> None:
        if self._following is None:
            return
        began = time.monotonic_ns()
        with _stage_named("after"):
            self._following.send(frame(FrameKind.HIDDEN, x.contiguous().view(torch.uint8).numpy()))
        self._count(began, x.nbytes)

    def receive(self, x: Tensor) -> None:
        if self._previous is not None:
            began = time.monotonic_ns()
            self._previous.allowed = {FrameKind.HIDDEN: x.nbytes}
            with _stage_named("before"):
                payload = self._previous.receive()[1]
                if len(payload) != x.nbytes:
                    raise EngineFatal(f"it sent {len(payload)} bytes of hidden states instead of {x.nbytes}")
            x.view(-1).view(torch.uint8).numpy()[:] = np.frombuffer(payload, np.uint8)  # one thread copies as fast as the network brings it
            self._count(began, 0)
        self._own.broadcast(x)

    def _count(self, began: int, num_bytes: int) -> None:
        self._num_frames += 1
        self._num_bytes += num_bytes
        self._waited_ns += time.monotonic_ns() - began

    def report(self) -> Sequence[int]:
        """This rank's own work, as ints for a beat."""
        work = self._own.work()[self._place.rank]
        waited = round(1e9 * work.waited_s) + self._waited_ns
        return work.num_exchanges + self._num_frames, work.num_bytes + self._num_bytes, waited, self._waited_ns, round(1e9 * work.steps_s)

    def work(self) -> list[RankWork]:
        said = {**self.reports, self._place.rank: self.report()}
        return [_work(said.get(rank, NO_REPORT)) for rank in range(self._place.parallelism.world)]

    def abort(self) -> None:
        self._own.abort()
        for link in self._links:
            link.shut()

    def close(self) -> None:
        self.abort()
        for link in self._links:
            link.close()


@contextmanager
def _stage_named(which: str) -> Iterator[None]:
    try:
        yield
    except EngineFatal as error:
        raise EngineFatal(f"the stage {which} this one: {error}") from error


NO_REPORT = (0,) * len(RankWork._fields)


def _work(report: Sequence[int]) -> RankWork:
    num_exchanges, num_bytes, *nanoseconds = report
    return RankWork(num_exchanges, num_bytes, *(each / 1e9 for each in nanoseconds))
