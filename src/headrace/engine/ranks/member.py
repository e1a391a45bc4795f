"""A member: a rank other than 0, which computes its part of the steps that rank 0 sends. It has no engine and no scheduler, and keeps
nothing between two steps but its weights, its KV, and its parts of adapters.
"""

from __future__ import annotations

import logging
import mmap
import os
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path

import torch

from headrace.core.errors import CheckpointError, ConfigError, EngineFatal
from headrace.core.parallelism import Place
from headrace.engine.config import EngineConfig
from headrace.engine.kv_sizing import step_tokens
from headrace.engine.ranks.adapters import MemberAdapters
from headrace.engine.ranks.frames import (
    INT_BYTES,
    AdapterOrder,
    FrameKind,
    RankFailure,
    RankHello,
    RankSizes,
    StepLimits,
    batch_on,
    frame,
    int_frame,
    json_frame,
    read_ints,
    read_json,
    read_step,
)
from headrace.engine.ranks.leader import BEAT_S
from headrace.engine.ranks.link import Frame, RankLink, connect, join
from headrace.engine.ranks.stage_peers import StagePeers
from headrace.engine.runner.loading import choose, load_part
from headrace.engine.runner.warmup import MAX_TOKENS, log_compiling
from headrace.tensor.backends import load_peers
from headrace.tensor.batch import KvCache
from headrace.tensor.host.cpu_features import CpuFeatures
from headrace.tensor.models.decoder import DecoderModel
from headrace.tensor.packed.file import PackedFolder
from headrace.tensor.packed.store import Pieces
from headrace.tensor.peers import Peers

log = logging.getLogger(__name__)


class RankMember:
    """Computes until rank 0 ends it. is_idle: it waits for rank 0"""

    def __init__(
        self,
        link: RankLink,
        model: DecoderModel,
        kv: KvCache,
        peers: Peers,
        limits: StepLimits,
        closing: ExitStack,
        adapters: MemberAdapters | None = None,
    ) -> None:
        self.link, self._model, self._kv, self._peers, self._limits, self._closing = link, model, kv, peers, limits, closing
        self._adapters = adapters
        self.is_idle = self.is_over = False

    def run(self) -> None:
        """Returns once rank 0 has ended the replica in order. Raises EngineFatal where it ended otherwise, and what a step raised."""
        with self._closing, torch.inference_mode():
            try:
                self.link.allowed = self._limits.allowed
                self.link.send(frame(FrameKind.READY))
                receive = self.link.receive if self._model.place.is_last else self.link.read_ahead(FrameKind.END)
                while self._take(receive):
                    pass
            finally:
                self.is_over = True

    def _take(self, receive: Callable[[], Frame]) -> bool:
        """False at the end."""
        self.is_idle = True
        kind, payload = receive()
        self.is_idle = False
        if kind is FrameKind.STEP:
            began = time.monotonic_ns()
            parts = {} if self._adapters is None else self._adapters.parts
            ids, batch = read_step(payload, self._limits, parts)
            device = self._model.device.name
            self._model.forward(ids.to(device), batch if device == "cpu" else batch_on(device, batch), self._kv)
            self._peers.note_step(time.monotonic_ns() - began)
        elif kind is FrameKind.LOGITS:
            self._compute_logits(*read_ints(payload, 1))
        elif kind is FrameKind.COPY:
            self._kv.copy_block(*read_ints(payload, 3))
        elif kind is FrameKind.CLEAR:
            self._kv.clear_pad_block()
        elif self._adapters is not None and kind is FrameKind.ADAPTER:
            self._adapters.load(read_json(AdapterOrder, payload))
        elif self._adapters is not None and kind is FrameKind.DROP:
            self._adapters.drop(*read_ints(payload, 1))
        return kind is not FrameKind.END

    def _compute_logits(self, num_rows: int) -> None:
        if not 1 <= num_rows <= self._limits.max_tokens:
            raise EngineFatal(f"logits of {num_rows} rows are asked for, outside 1..{self._limits.max_tokens}")
        hidden = torch.empty((num_rows, self._model.hidden_size), dtype=self._model.activations)
        self._peers.broadcast(hidden)
        self._model.logits(hidden)


Join = Callable[[Place, Mapping[str, str]], tuple[RankLink, Peers]]
"""Meets the other ranks. It is given what has to be equal on all of them, by name. Raises ConfigError, and EngineFatal once rank 0 has
ended."""


def join_ranks(path: Path, place: Place, facts: Mapping[str, str]) -> tuple[RankLink, Peers]:
    """On one machine, where rank 0 listens at the path."""
    with ExitStack() as unless_joined:
        link = RankLink(connect(path), {})
        unless_joined.callback(link.close)
        fd = join(link, RankHello(place.rank, dict(facts)))
        try:
            peers = load_peers(mmap.mmap(fd, 0), place)
        finally:
            os.close(fd)
        unless_joined.pop_all()
    return link, peers


def make_member(
    config: EngineConfig,
    place: Place,
    join_others: Join,
    packed: PackedFolder | None = None,
    features: CpuFeatures | None = None,
) -> tuple[RankMember, Pieces | None]:
    """Joins the replica, and loads this rank's part of the model. Also returns the packed weights to write.

    Raises ConfigError, CheckpointError, and EngineFatal once rank 0 has ended.
    """
    choices = choose(config, packed, features, place)
    with ExitStack() as unless_ready:
        link, peers = join_others(place, choices.facts(config))
        unless_ready.callback(link.close)
        unless_ready.callback(peers.close)
        unless_ready.enter_context(_beating(link, peers))
        unless_ready.enter_context(_saying_why(link, peers))
        with log_compiling(choices.backend.compiler):
            part = load_part(config, choices, packed, place, peers)
        loader = part.adapter_loader(config)
        budget = part.budget(config, loader)
        own = part.size(config, budget)
        link.allowed = {FrameKind.BLOCKS: INT_BYTES}
        sizes = RankSizes(own.num_full_blocks, part.loaded.resident_bytes, part.loaded.checkpoint_digest, part.weights_digest)
        link.send(json_frame(FrameKind.SIZES, sizes))
        sizing = part.size(config, budget, most=read_ints(link.receive()[1], 1)[0])
        for line in (*choices.lines(config), *sizing.lines):
            log.info("%s", line)
        limits = StepLimits(
            max_tokens=max(MAX_TOKENS, step_tokens(config, sizing.max_model_len)),
            max_rows=config.max_num_seqs,
            table_width=-(-sizing.max_model_len // config.block_size) + 1,
            num_groups=len(part.kv_groups),
            max_places=0 if loader is None else 1 + config.max_loras,
        )
        kv = part.allocate(config, sizing)
        adapters = None if loader is None else MemberAdapters(loader, link)
        member = RankMember(link, part.loaded.model, kv, peers, limits, unless_ready.pop_all(), adapters)
    return member, None if part.loaded.store is None else part.loaded.store.save()


@contextmanager
def _saying_why(link: RankLink, peers: Peers) -> Iterator[None]:
    """What ends this rank within the block, rank 0 is given, before it sees the others woken."""
    try:
        yield
    except Exception as error:
        is_refused = isinstance(error, ConfigError | CheckpointError)
        reason = str(error) if is_refused or isinstance(error, EngineFatal) else repr(error)
        with suppress(EngineFatal):  # rank 0 has ended
            link.send(json_frame(FrameKind.FAILED, RankFailure(reason[:1000], is_refused)))
        peers.abort()
        raise


@contextmanager
def _beating(link: RankLink, peers: Peers) -> Iterator[None]:
    """Tells rank 0 that this process runs, from a thread of its own; once that has ended, wakes what waits for it."""
    over = threading.Event()

    def beat() -> None:
        try:
            while not over.wait(BEAT_S):
                link.send(int_frame(FrameKind.BEAT, *(peers.report() if isinstance(peers, StagePeers) else ())))
        except EngineFatal:
            if not over.is_set():
                peers.abort()

    thread = threading.Thread(target=beat, name="headrace-beat", daemon=True)
    thread.start()
    try:
        yield
    finally:
        over.set()
        link.shut()  # a beat that waits for rank 0 ends
        thread.join()
