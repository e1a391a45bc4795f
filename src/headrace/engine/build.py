"""Composes one engine from its configuration: the only place where policy and tensors are put together."""

from __future__ import annotations

import secrets
import threading
import time
from collections.abc import Callable, Generator, Iterator
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeAlias

from headrace.core.clock import Clock
from headrace.core.model_info import ModelInfo
from headrace.core.parallelism import ALONE, Parallelism, Place
from headrace.core.speculation import DRAFT_MODEL
from headrace.engine.adapters.preparer import AdapterPreparer
from headrace.engine.config import EngineConfig
from headrace.engine.loop import Engine, Outbox
from headrace.engine.preparation import Preparer
from headrace.engine.sleeping import EngineMemory
from headrace.engine.steps import Runner
from headrace.engine.utilisation import EngineMeter
from headrace.machine.cache_folder import packed_directory
from headrace.machine.forks import FORKS
from headrace.machine.resources import allowed_cpus, read_available
from headrace.policy.config import SchedulerConfig
from headrace.policy.kvcache.manager import KvManager
from headrace.policy.schedule.scheduler import Scheduler
from headrace.tensor.host.threads import plan_threads
from headrace.tensor.packed.file import PackedFolder

if TYPE_CHECKING:
    from headrace.engine.ranks.member import Join, RankMember
    from headrace.engine.ranks.meter import RankMeter
    from headrace.engine.runner.build import Lead
    from headrace.wire.target import GrpcTarget

MAX_MEMORY_SHARE = 0.5

Rendezvous: TypeAlias = "Path | GrpcTarget"


@contextmanager
def reading_ahead(config: EngineConfig, place: Place = ALONE) -> Iterator[PackedFolder | None]:
    folder = read_ahead(config, place)
    try:
        yield folder
    finally:
        if folder is not None:
            folder.drop()


def read_ahead(config: EngineConfig, place: Place = ALONE) -> PackedFolder | None:
    if config.device != "cpu" or config.load_format == "dummy" or config.kernels == "reference":
        return None
    directory = packed_directory()
    if directory is None:
        return None
    asked: dict[str, object] = {"place": str(place)} if place.parallelism.world > 1 else {}
    asked |= {name: getattr(config, name) for name in ("quantization", "dtype", "kernels", "deterministic", "num_threads")}
    folder = PackedFolder(directory, {"model": str(Path(config.model).resolve()), "num_cpus": len(allowed_cpus() or ()), **asked})
    folder.read_ahead(int(MAX_MEMORY_SHARE * read_available().num_bytes / place.parallelism.num_here))
    return folder


def part_of_machine(config: EngineConfig, num_parts: int) -> EngineConfig:
    """The options of one of several processes that share this machine, called before it is bound to CPUs: a rank has its part of the
    threads that one process would have on all of them.
    """
    num_threads = config.num_threads
    if num_threads is None and config.parallelism.world > 1 < num_parts:
        num_threads = max(1, plan_threads(None).num_threads // num_parts)
    return replace(config, memory_fraction=config.memory_fraction / num_parts, num_threads=num_threads)


POLL_S = 0.05

REST_S = 0.5
"""Idle time begins this long after the last request."""


def do_while_idle(
    pieces: Iterator[None], *, is_idle: Callable[[], bool], is_over: Callable[[], bool], sleep: Callable[[float], None] = time.sleep
) -> None:
    """pieces   each takes some milliseconds of all CPUs"""
    rested_s = 0.0
    while not is_over():
        rested_s = rested_s + POLL_S if is_idle() else 0.0
        if rested_s <= REST_S:
            sleep(POLL_S)
        elif next(pieces, _DONE) is _DONE:
            return


_DONE = object()


WRITER = "headrace-pack"

Pieces = Generator[None, None, None]
"""The type of the same name in `tensor.packed.store`, which cannot be imported here without torch."""

MAX_WAITING_BYTES = 256 << 20

CACHED_SHARE = 0.5

JOIN_S = 2.0


def make_scheduler(config: EngineConfig, info: ModelInfo, *, block_key: str = "") -> Scheduler:
    """block_key: secret (hex) of block hashes; empty: a random one"""
    drafting = config.speculative_config
    key = bytes.fromhex(block_key) or secrets.token_bytes(32)
    kv = KvManager(
        info.kv_groups,
        info.num_blocks,
        info.block_size,
        key=key,
        model_digest=info.digests.get("model", "").encode(),
        kv_dtype=info.digests.get("kv_dtype", ""),
        caching=config.enable_prefix_caching,
        cached_share=CACHED_SHARE,
    )
    return Scheduler(
        SchedulerConfig(
            max_num_seqs=config.max_num_seqs,
            max_num_batched_tokens=config.max_num_batched_tokens,
            max_model_len=info.max_model_len,
            max_waiting=config.max_waiting,
            max_waiting_bytes=MAX_WAITING_BYTES,
            eos_token_ids=info.eos_token_ids,
            queue_policy=config.queue_policy,
            enable_chunked_prefill=config.enable_chunked_prefill,
            depth=config.max_steps_in_flight,
            is_pipeline=config.pipeline_parallel_size > 1,
            costly_context=info.costly_context,
            num_speculative_tokens=0 if drafting is None else drafting.num_speculative_tokens,
            has_free_drafts=drafting is None or drafting.method != DRAFT_MODEL,
        ),
        kv,
    )


def assemble(
    config: EngineConfig,
    runner: Runner,
    info: ModelInfo,
    outbox: Outbox,
    *,
    block_key: str = "",
    clock: Clock = time.monotonic,
    preparer: Preparer | None = None,
    adapters: AdapterPreparer[Any] | None = None,
    meter: EngineMeter | None = None,
    ranks: RankMeter | None = None,
    memory: EngineMemory | None = None,
) -> Engine:
    scheduler = make_scheduler(config, info, block_key=block_key)
    info = replace(info, queue_policy=config.queue_policy)
    engine = Engine(
        scheduler, runner,
        info=info, outbox=outbox, preparer=preparer, adapters=adapters, clock=clock, meter=meter, ranks=ranks, memory=memory,
    )  # fmt: skip
    if adapters is not None:
        adapters.attach(engine)
    if ranks is not None:
        engine.closing.callback(lambda: ranks.log(scheduler.sequences.counters))
    return engine


def build_engine(
    config: EngineConfig, outbox: Outbox, rendezvous: Rendezvous | None = None, check_ranks: Callable[[], None] = lambda: None
) -> Engine:
    """Weights are loaded and kernels warm; `run` has not been started.

    rendezvous   where the other ranks come, if there are any: a path, or an address for stages on other machines
    check_ranks  called while they are waited for; raises ConfigError once one cannot come

    Raises: ConfigError, CheckpointError, and ForkedProcess in a fork of a process that has made an engine.
    """
    engine, _, unwritten = _build(config, outbox, rendezvous, check_ranks=check_ranks)
    if unwritten is not None:
        threading.Thread(target=_write_all, args=(engine, unwritten), name=WRITER, daemon=False).start()
    return engine


def build_served_engine(
    config: EngineConfig, outbox: Outbox, rendezvous: Rendezvous | None = None, block_key: str = "", *, compiles_beside: bool = False
) -> Engine:
    """compiles_beside: a first start may have another process compile kernels, as no program that only uses an engine expects

    A thread sets the digest of all weights in the engine's `info`: gateways need it to know whether a stream of another replica may
    go on here.
    """
    engine, weights, unwritten = _build(config, outbox, rendezvous, block_key, compiles_beside=compiles_beside)
    if weights is not None or unwritten is not None:
        thread = threading.Thread(target=_end_start, args=(engine, weights, unwritten), name=WRITER, daemon=True)
        thread.start()
        engine.closing.callback(thread.join, JOIN_S)
    return engine


def _write_all(engine: Engine, unwritten: Pieces) -> None:
    program = threading.main_thread()
    do_while_idle(unwritten, is_idle=lambda: engine.is_idle, is_over=lambda: engine.is_stopping or not program.is_alive())
    for _ in unwritten:
        pass


def _end_start(engine: Engine, weights: Callable[[], str] | None, unwritten: Pieces | None) -> None:
    if weights is not None:
        engine.set_weights_digest(weights())
    if unwritten is not None:
        do_while_idle(unwritten, is_idle=lambda: engine.is_idle, is_over=lambda: engine.is_stopping)
        unwritten.close()


def build_member(config: EngineConfig, rank: int, rendezvous: Rendezvous, own: GrpcTarget | None = None) -> RankMember:
    """A rank other than 0, which has joined the replica; `run` has not been started.

    own  where a middle stage is reached, if its stages are on several machines

    Raises: ConfigError, CheckpointError, and EngineFatal once rank 0 has ended.
    """
    config = config.checked()
    place = _parallelism(config, rendezvous).place(rank)
    with reading_ahead(config, place) as packed:
        from headrace.engine.ranks.member import join_ranks, make_member

        join: Join = partial(join_ranks, rendezvous) if isinstance(rendezvous, Path) else _join_stages(rendezvous, own)
        member, unwritten = make_member(config, place, join, packed)
    if unwritten is not None:
        idle = partial(do_while_idle, unwritten, is_idle=lambda: member.is_idle, is_over=lambda: member.is_over)
        threading.Thread(target=idle, name=WRITER, daemon=True).start()
    return member


def _leader(rendezvous: Rendezvous, parallelism: Parallelism, check: Callable[[], None]) -> Lead:
    if isinstance(rendezvous, Path):
        from headrace.engine.ranks.leader import lead_ranks

        return partial(lead_ranks, rendezvous, parallelism, check)
    from headrace.engine.ranks.stages import lead_stages

    return partial(lead_stages, rendezvous, parallelism, check)


def _join_stages(rendezvous: GrpcTarget, own: GrpcTarget | None) -> Join:
    from headrace.engine.ranks.stages import join_stages

    return partial(join_stages, rendezvous, own or rendezvous)


def _parallelism(config: EngineConfig, rendezvous: Rendezvous | None) -> Parallelism:
    return replace(config.parallelism, is_apart=config.device != "cpu" or not isinstance(rendezvous, Path | None))


def _build(
    config: EngineConfig,
    outbox: Outbox,
    rendezvous: Rendezvous | None,
    block_key: str = "",
    check_ranks: Callable[[], None] = lambda: None,
    *,
    compiles_beside: bool = False,
) -> tuple[Engine, Callable[[], str] | None, Pieces | None]:
    """Also returns a function that hashes the weights (None: the digest is known), and the packed weights to write."""
    config = config.checked()
    FORKS.begin_engine()
    parallelism = _parallelism(config, rendezvous)
    with reading_ahead(config, parallelism.place(0)) as packed:
        from headrace.engine.runner.build import build

        lead = None if rendezvous is None or parallelism.world == 1 else _leader(rendezvous, parallelism, check_ranks)
        built = build(config, packed, lead=lead, parallelism=parallelism, compiles_beside=compiles_beside)
    meter = EngineMeter(built.info, built.read_gpu, built.read_experts)
    engine = assemble(
        config, built.runner, built.info, outbox,
        block_key=block_key, preparer=built.preparer, adapters=built.adapters, meter=meter, ranks=built.ranks, memory=built.memory,
    )  # fmt: skip
    built.preparer.attach(engine)
    if built.group is not None:
        built.group.watch_beats(engine.abort)
    return engine, built.weights, built.unwritten
