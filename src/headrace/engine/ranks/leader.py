"""Rank 0's side of a replica of several ranks: a model and a KV cache that have the other ranks do the same, and the watch over them.

    start    gather (`link`), agree on the number of KV blocks, wait until all have allocated them
    a step   STEP, and LOGITS where the last stage has several ranks; a block copy before it
    beside   adapters are loaded and dropped (`adapters`)
    end      END, once the runner is closed

A fault of any rank ends the replica: what waits in shared memory is woken, the running step or the next one raises EngineFatal with the
reason, and an engine that computes none is called.
"""

from __future__ import annotations

import logging
import mmap
import os
import select
import threading
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, closing, contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path

from torch import Tensor

from headrace.core.errors import ConfigError, EngineFatal, HeadraceError
from headrace.core.parallelism import Parallelism, Place, RankWork
from headrace.core.plan import Plan
from headrace.engine.ranks.adapters import part_of_rank_0
from headrace.engine.ranks.frames import (
    INT_BYTES,
    MAX_JSON_BYTES,
    FrameKind,
    LoadedAdapter,
    RankFailure,
    RankSizes,
    frame,
    int_frame,
    read_ints,
    read_json,
    step_frame,
)
from headrace.engine.ranks.link import RankLink, connections, gather, listen, welcome
from headrace.engine.steps import Runner, Ticket
from headrace.machine.signals import interrupts_deferred
from headrace.tensor.backends import load_peers, shared_bytes
from headrace.tensor.batch import ForwardBatch, KvCache
from headrace.tensor.models.decoder import DecoderModel
from headrace.tensor.peers import Peers

log = logging.getLogger(__name__)

BEAT_S = 0.25
MAX_MISSED = 6
"""Looks in a row that saw no beat of a rank. Looks, not seconds: where the whole machine stands still, none are made."""
MAX_MISSED_AT_START = 240
"""While an engine is built: a compiler may keep beats back for seconds."""
JOIN_S = 2.0

OnFault = Callable[[HeadraceError], None]


@dataclass(slots=True)
class _Member:
    link: RankLink
    num_missed: int = 0
    said: dict[FrameKind, bytearray] = field(default_factory=dict)


class RankGroup:
    """The other ranks of the replica whose rank 0 this process is. Frames of steps are sent by one thread at a time, those of adapters and
    `look` by any.

    answers  number of an adapter that is being loaded -> rank -> why it cannot (empty: it has); whoever asks makes and removes the entry
    unused   numbers of adapters that no step will name
    """

    def __init__(self, links: Mapping[int, RankLink], place: Place, peers: Peers, reports: dict[int, Sequence[int]] | None = None) -> None:
        """reports: where what each rank says of its work with a beat is kept; None: ranks say nothing, and share memory"""
        self.place, self.peers, self.members = place, peers, frozenset(links)
        self.answers: dict[int, dict[int, str]] = {}
        self.unused: deque[int] = deque()
        self.fault: HeadraceError | None = None
        self._members = {rank: _Member(link) for rank, link in links.items()}
        self._reading = threading.Lock()
        self._ending = threading.Lock()
        self._on_fault: OnFault | None = None
        self._reports, self._beat_bytes = reports, 0 if reports is None else INT_BYTES * len(RankWork._fields)
        self._is_ready = False
        self._closed = threading.Event()
        self._watch = threading.Thread(target=self._keep_looking, name="headrace-ranks", daemon=True)
        for link in links.values():
            link.allowed = {
                FrameKind.BEAT: self._beat_bytes, FrameKind.FAILED: MAX_JSON_BYTES, FrameKind.SIZES: MAX_JSON_BYTES, FrameKind.READY: 0
            }  # fmt: skip

    # start

    def agree(self, own: RankSizes) -> tuple[int, dict[int, RankSizes]]:
        """Returns the number of KV blocks that fit every rank, and the sizes of all. The watch begins. Raises what ended a rank, and
        ConfigError for one that has another model."""
        self._watch.start()
        sizes = {0: own, **{rank: read_json(RankSizes, said) for rank, said in self._wait_for(FrameKind.SIZES).items()}}
        for rank, its in sizes.items():
            are_hashed = its.weights_digest and own.weights_digest
            if its.checkpoint_digest != own.checkpoint_digest or (are_hashed and its.weights_digest != own.weights_digest):
                raise ConfigError("model", f"the weights that rank {rank} reads are not those of rank 0", "Give all ranks the same folder.")
        num_blocks = min(its.num_blocks for its in sizes.values())
        self.send(int_frame(FrameKind.BLOCKS, num_blocks))
        return num_blocks, sizes

    def wait_until_ready(self) -> None:
        """From then on a close ends the ranks in order."""
        self._wait_for(FrameKind.READY)
        for member in self._members.values():
            member.link.allowed = {
                FrameKind.BEAT: self._beat_bytes, FrameKind.FAILED: MAX_JSON_BYTES, FrameKind.LOADED: MAX_JSON_BYTES
            }  # fmt: skip
        self._is_ready = True

    def _wait_for(self, kind: FrameKind) -> dict[int, bytearray]:
        """The payload of each rank's frame of that kind, once all have come."""
        self.wait_until(lambda: all(kind in member.said for member in self._members.values()))
        return {rank: member.said.pop(kind) for rank, member in self._members.items()}

    def wait_until(self, is_said: Callable[[], bool]) -> None:
        """Raises what has ended the ranks before. May be called by several threads."""
        arriving = select.poll()
        for member in self._members.values():
            with suppress(ValueError):  # it is closed: then the group is, as is said below
                arriving.register(member.link, select.POLLIN)
        while not is_said():
            if self._closed.is_set():
                raise EngineFatal("the ranks of this replica have ended")
            arriving.poll(1000 * BEAT_S)
            self._read_all()
            if self.fault is not None:
                raise self.fault

    # steps

    def send(self, data: bytes) -> None:
        for rank, member in self._members.items():
            self._send(rank, member, data)

    def send_to_stage(self, data: bytes) -> None:
        """To rank 0's own."""
        for rank in range(1, self.place.parallelism.tp):
            self._send(rank, self._members[rank], data)

    def send_to_earlier_stages(self, data: bytes) -> None:
        for rank in range(self.place.parallelism.tp, self.place.parallelism.world):
            self._send(rank, self._members[rank], data)

    def drop_unused(self) -> None:
        """Before the next adapter is loaded, and the next step."""
        with suppress(IndexError):
            while True:
                self.send(int_frame(FrameKind.DROP, self.unused.popleft()))

    def _send(self, rank: int, member: _Member, data: bytes) -> None:
        try:
            member.link.send(data)
        except EngineFatal as error:
            raise EngineFatal(f"rank {rank}: {error}") from error

    @contextmanager
    def computing(self) -> Iterator[None]:
        """An error in the block ends the replica: the ranks are no longer at the same place of the same step. Ctrl-C waits for its end."""
        with interrupts_deferred():
            try:
                yield
            except Exception as error:
                self._read_all()  # what a rank says of its failure tells more than that it has left
                self.end(error if isinstance(error, EngineFatal) else EngineFatal(f"rank 0 failed within a step: {error!r:.300}"))
                raise EngineFatal(str(self.fault or error)) from error

    # faults

    def watch_beats(self, on_fault: OnFault) -> None:
        """From now on MAX_MISSED looks without a beat are a fault.

        on_fault: called once, at a fault of any rank, from any thread; at once where it has happened
        """
        with self._reading:
            for member in self._members.values():
                member.num_missed = 0
        with self._ending:
            self._on_fault = on_fault
            fault = self.fault
        if fault is not None:
            on_fault(fault)

    def look(self) -> None:
        """Called every BEAT_S."""
        with self._reading:
            for member in self._members.values():
                member.num_missed += 1
        self._read_all()
        limit = MAX_MISSED_AT_START if self._on_fault is None else MAX_MISSED
        for rank, member in self._members.items():
            if member.num_missed >= limit:
                self.end(EngineFatal(f"rank {rank} has not beaten for {limit * BEAT_S:g} s: it is stopped, or hangs"))

    def end(self, fault: HeadraceError) -> None:
        """Only the first fault counts."""
        with self._ending:
            if self.fault is not None or self._closed.is_set():
                return
            self.fault, call = fault, self._on_fault
        log.critical("the ranks of this replica are ended: %s", fault)
        self.peers.abort()
        for member in self._members.values():
            member.link.shut()
        if call is not None:
            call(fault)

    def close(self) -> None:
        """The ranks end with exit status 0. Nothing is sent after it."""
        if self._closed.is_set():
            return
        self._closed.set()
        if self._watch.ident is not None:
            self._watch.join(JOIN_S)
        links = [member.link for member in self._members.values()]
        if self._is_ready and self.fault is None:
            for link in links:
                with suppress(EngineFatal):  # it has ended already
                    link.send(frame(FrameKind.END))
            for link in links:  # a beat that fails would be taken for a fault
                link.wait_until_closed(JOIN_S)
        for link in links:
            link.close()
        self.peers.close()  # a step that the runner has abandoned waits no more

    def _keep_looking(self) -> None:
        while not self._closed.wait(BEAT_S):
            self.look()

    def _read_all(self) -> None:
        with self._reading:
            for rank, member in self._members.items():
                try:
                    for kind, payload in member.link.arrived():
                        self._take(rank, member, kind, payload)
                except EngineFatal as error:
                    self.end(EngineFatal(f"rank {rank}: {error}"))

    def _take(self, rank: int, member: _Member, kind: FrameKind, payload: bytearray) -> None:
        if kind is FrameKind.BEAT:
            member.num_missed = 0
            if self._reports is not None:
                self._reports[rank] = read_ints(payload, len(RankWork._fields))
        elif kind is FrameKind.FAILED:
            failure = read_json(RankFailure, payload)
            reason = f"rank {rank} failed: {failure.reason}"
            self.end(ConfigError(f"rank {rank}", failure.reason.rstrip(".")) if failure.is_refused else EngineFatal(reason))
        elif kind is FrameKind.LOADED:
            loaded = read_json(LoadedAdapter, payload)
            if rank in (answers := self.answers.get(loaded.number, {rank: ""})):
                raise EngineFatal(f"it answers for adapter {loaded.number}, and was not asked")
            answers[rank] = loaded.reason
        elif kind in member.said:
            raise EngineFatal(f"it sent {kind.name} twice")
        else:
            member.said[kind] = payload


def lead_ranks(path: Path, parallelism: Parallelism, check: Callable[[], None], facts: Mapping[str, str]) -> RankGroup:
    """Waits until the other ranks have come to the path. Raises ConfigError, and what `check` raises meanwhile."""
    with closing(listen(path)) as listening:
        try:
            links = gather(connections(listening, check), parallelism.world, facts)
        finally:
            path.unlink(missing_ok=True)
    return make_group(links, parallelism.place(0))


def make_group(links: Mapping[int, RankLink], place: Place) -> RankGroup:
    """Gives all ranks the memory that they share. The links are the group's from then on, and are closed if there is none."""
    with ExitStack() as unless_made:
        for link in links.values():
            unless_made.callback(link.close)
        fd = os.memfd_create("headrace-ranks")
        try:
            os.ftruncate(fd, shared_bytes(place.parallelism))
            peers = load_peers(mmap.mmap(fd, 0), place)
            welcome(links, fd)
        finally:
            os.close(fd)
        unless_made.pop_all()
    return RankGroup(links, place, peers)


class LeadingModel:
    """Implements the runner's `Model`: every rank of this stage computes its part. Earlier stages have the step already (`pipeline`)."""

    def __init__(self, model: DecoderModel, group: RankGroup) -> None:
        self.vocab_size = model.vocab_size
        self._model, self._group = model, group

    def forward(self, ids: Tensor, batch: ForwardBatch, kv: KvCache) -> Tensor:
        with self._group.computing():
            own, adapters = part_of_rank_0(batch)
            if self._group.place.parallelism.tp > 1:
                self._group.drop_unused()
                self._group.send_to_stage(step_frame(ids, batch, adapters))
            return self._model.forward(ids, own, kv)

    def logits(self, hidden: Tensor) -> Tensor:
        with self._group.computing():
            if self._group.place.parallelism.tp > 1:
                hidden = hidden.contiguous()
                self._group.send_to_stage(int_frame(FrameKind.LOGITS, len(hidden)))
                self._group.peers.broadcast(hidden)
            return self._model.logits(hidden)


class LeadingKv(KvCache):
    """Changes the same blocks on every rank; copies those of this stage, as `LeadingModel` computes its steps."""

    def __init__(self, own: KvCache, group: RankGroup) -> None:
        super().__init__(own.layers, own.group_of, own.block_size, own.pools)
        self._group = group

    def copy_block(self, group: int, source: int, target: int) -> None:
        with self._group.computing():
            self._group.send_to_stage(int_frame(FrameKind.COPY, group, source, target))
            super().copy_block(group, source, target)

    def clear_pad_block(self) -> None:
        with self._group.computing():
            self._group.send(frame(FrameKind.CLEAR))
            super().clear_pad_block()


class LeadingRunner:
    """Ends the ranks behind the last step of a runner, when it is closed."""

    def __init__(self, runner: Runner, group: RankGroup) -> None:
        self._runner, self._group = runner, group

    def submit(self, plan: Plan) -> Ticket:
        return self._runner.submit(plan)

    def close(self) -> None:
        self._runner.close()
        self._group.close()
