"""LoRA adapters of a replica of several ranks: each rank loads its part of an adapter, and steps name adapters by number.

load   ADAPTER to all. Every rank reads the files, beside the steps that it computes, and members answer with LOADED. An adapter that
       one rank cannot load is none on any
step   names the adapters of its tokens (`frames.step_frame`): rank 0 names one once all have it
drop   DROP, once nothing on rank 0 refers to an adapter. No step names it any more
"""

from __future__ import annotations

import logging
import os
import weakref
from contextlib import ExitStack, suppress
from dataclasses import dataclass, replace
from functools import partial
from itertools import count
from pathlib import Path
from typing import TYPE_CHECKING, Protocol, cast

from headrace.core.adapters import MAX_UNANSWERED
from headrace.core.errors import CheckpointError, EngineFatal
from headrace.core.regular_files import FileThread
from headrace.engine.ranks.frames import NO_ADAPTER, AdapterOrder, FrameKind, LoadedAdapter, json_frame
from headrace.engine.ranks.link import RankLink
from headrace.tensor.batch import ForwardBatch, PackedAdapter

if TYPE_CHECKING:
    from headrace.engine.ranks.leader import RankGroup

log = logging.getLogger(__name__)

ZEROS = 0
"""The number of an adapter that changes nothing, with which all ranks start: for steps that are made up."""

MAX_READS = MAX_UNANSWERED + 1
"""At once: those that rank 0 has left behind unanswered, and the one that it waits for."""

FAILED = "it could not be loaded by a fault of this program; the log of the rank says more"


class LoadsParts(Protocol):
    """As `AdapterLoader`, of one rank."""

    max_bytes: int

    def inspect(self, folder: Path) -> str: ...

    def load(self, folder: Path, digest: str) -> PackedAdapter: ...

    def zeros(self) -> PackedAdapter: ...


@dataclass(frozen=True, slots=True, eq=False, weakref_slot=True)
class DividedAdapter:
    """An adapter that every rank has a part of, until this object is gone. own: rank 0's"""

    number: int
    own: PackedAdapter

    @property
    def num_bytes(self) -> int:
        return self.own.num_bytes


class DividingLoader:
    """Rank 0's `LoadsAdapters`. Only rank 0 inspects: the digest says to the others whether they read the same."""

    def __init__(self, own: LoadsParts, group: RankGroup) -> None:
        self.max_bytes, self.inspect = own.max_bytes, own.inspect
        self._own, self._group, self._numbers = own, group, count(ZEROS + 1)

    def zeros(self) -> DividedAdapter:
        return self._held(ZEROS, self._own.zeros())

    def load(self, folder: Path, digest: str) -> DividedAdapter:
        """Waits for every rank. Raises CheckpointError for what one of them cannot load, and EngineFatal once the ranks have ended."""
        number = next(self._numbers)
        self._group.drop_unused()
        with ExitStack() as unless_loaded:
            unless_loaded.callback(self._group.unused.append, number)
            answers = self._group.answers[number] = {}
            try:
                self._group.send(json_frame(FrameKind.ADAPTER, AdapterOrder(number, os.path.abspath(folder), digest)))
                own = self._own.load(folder, digest)
            finally:  # a member that still reads is not asked to drop
                self._group.wait_until(lambda: answers.keys() == self._group.members)
                del self._group.answers[number]
            if refused := "; ".join(f"rank {rank}: {reason}" for rank, reason in sorted(answers.items()) if reason):
                raise CheckpointError(str(folder), refused)
            unless_loaded.pop_all()
        return self._held(number, own)

    def _held(self, number: int, own: PackedAdapter) -> DividedAdapter:
        adapter = DividedAdapter(number, own)
        weakref.finalize(adapter, self._group.unused.append, number).atexit = False
        return adapter


def part_of_rank_0(batch: ForwardBatch) -> tuple[ForwardBatch, tuple[int, ...]]:
    """The batch with rank 0's parts of its adapters, and by place the adapters' numbers, up to the last place of a token."""
    if batch.adapters is None:
        return batch, ()
    resident = cast("tuple[DividedAdapter | None, ...]", batch.adapters.resident[: int(batch.adapters.slots.max()) + 1])
    own = tuple(None if each is None else each.own for each in resident)
    numbers = tuple(NO_ADAPTER if each is None else each.number for each in resident)
    return replace(batch, adapters=replace(batch.adapters, resident=own)), numbers


class MemberAdapters:
    """The parts of adapters that a member has.

    parts  by number; None: it is being read, or could not be
    """

    def __init__(self, loader: LoadsParts, link: RankLink) -> None:
        self.parts: dict[int, PackedAdapter | None] = {ZEROS: loader.zeros()}
        self._loader, self._link = loader, link
        self._reading = set[int]()

    def load(self, order: AdapterOrder) -> None:
        """Returns at once: a thread reads the files and answers. Raises EngineFatal for what rank 0 may not ask for."""
        if order.number in self.parts:
            raise EngineFatal(f"adapter {order.number} is to be loaded twice")
        if len(self._reading) >= MAX_READS:
            raise EngineFatal(f"more than {MAX_READS} adapters are to be read at once")
        self.parts[order.number] = None
        self._reading.add(order.number)
        try:
            FileThread(partial(self._read, order)).start()
        except RuntimeError as error:  # the limit of threads
            self._answer(order, str(error))

    def drop(self, number: int) -> None:
        """Raises EngineFatal for what is not there, and while it is read."""
        if number not in self.parts or number in self._reading:
            raise EngineFatal(f"adapter {number} is to be dropped, and is not loaded")
        del self.parts[number]

    def _read(self, order: AdapterOrder) -> None:
        reason = ""
        try:
            self.parts[order.number] = self._loader.load(Path(order.folder), order.digest)
        except CheckpointError as error:
            log.error("an adapter cannot be used: %s", error)
            reason = error.reason
        except Exception:  # the outermost border of this thread: rank 0 waits for an answer
            log.exception("an adapter could not be loaded")
            reason = FAILED
        self._answer(order, reason)

    def _answer(self, order: AdapterOrder, reason: str) -> None:
        self._reading.discard(order.number)
        with suppress(EngineFatal):  # rank 0 has ended
            self._link.send(json_frame(FrameKind.LOADED, LoadedAdapter(order.number, reason[:1000])))
