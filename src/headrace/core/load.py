"""A replica's load and counters, sent to gateways in snapshots, which export them as metrics."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Iterable, Mapping
from dataclasses import astuple, dataclass, field, fields
from enum import Enum
from operator import add, attrgetter, sub
from typing import Annotated, Any, NamedTuple, get_origin, get_type_hints

from headrace.core.request import PriorityClass

STEP_BOUNDS_S = (0.0005, 0.001, 0.002, 0.005, 0.01, 0.02, 0.05, 0.1, 0.2, 0.5, 1.0, 2.0, 5.0, 10.0)
"""Inclusive. A last bucket holds longer steps."""


class FailureKind(Enum):
    """The operation that raised inside an engine."""

    STEP = "step"
    """A step is undone, and repeated in parts."""
    PLAN = "plan"
    """Tried again."""
    MESSAGE = "message"
    """Handling a request, a cancel or another message: that request ends."""
    PREREQUISITE = "prerequisite"
    """The request that waits for it ends."""
    COMMIT = "commit"
    """The commit of one sequence's row: that sequence ends."""


@dataclass(frozen=True, slots=True)
class Counter:
    """How a row of EngineCounters is published as a metric.

    metric  name of its family
    vllm    name of the family at vLLM; "": none
    label   "": the counter is one number
    values  label values that are always shown; (): only values that were counted
    scale   what one of the counter is of the metric's unit
    """

    metric: str
    text: str
    vllm: str = ""
    label: str = ""
    values: tuple[str, ...] = ()
    scale: float = 1

    @property
    def labels(self) -> tuple[str, ...]:
        return (self.label,) if self.label else ()

    def series(self, counted: Any) -> list[tuple[tuple[str, ...], float]]:
        """Pairs of label values and count. counted: the row's value."""
        if not self.label:
            return [((), counted * self.scale)]
        return [((value,), counted.get(value, 0)) for value in self.values or sorted(counted)]


@dataclass(slots=True)
class EngineCounters:
    """Counters since the engine process started. They only grow, so a reader that is late or reads twice misses and repeats nothing.

    The wire's field and both metric names of a counter are derived from its row (`COUNTERS`).

    step_buckets  steps between two neighbouring STEP_BOUNDS_S, below the first and above the last
    """

    prompt_tokens: Annotated[int, Counter("headrace_prompt_tokens", "Prompt tokens of accepted requests.", "vllm:prompt_tokens")] = 0
    generation_tokens: Annotated[int, Counter("headrace_generation_tokens", "Tokens generated.", "vllm:generation_tokens")] = 0
    prefix_cache_hit_tokens: Annotated[
        int, Counter("headrace_prefix_cache_hit_tokens", "Prompt tokens taken from the prefix cache.", "vllm:prefix_cache_hits")
    ] = 0
    prefix_cache_query_tokens: Annotated[
        int, Counter("headrace_prefix_cache_query_tokens", "Prompt tokens looked up in the prefix cache.", "vllm:prefix_cache_queries")
    ] = 0
    preemptions: Annotated[
        int,
        Counter(
            "headrace_preemptions", "Sequences that lost their KV blocks to other sequences and were recomputed.", "vllm:num_preemptions"
        ),
    ] = 0
    steps: Annotated[int, Counter("headrace_steps", "Steps committed.")] = 0
    read_megabytes: Annotated[
        int,
        Counter(
            "headrace_read_bytes",
            "Weights and KV that the steps had to read, estimated from their plans.",
            "vllm:estimated_read_bytes_per_gpu",
            scale=10**6,
        ),
    ] = 0
    megaflops: Annotated[
        int,
        Counter(
            "headrace_flops",
            "Multiplications and additions of the steps, estimated from their plans.",
            "vllm:estimated_flops_per_gpu",
            scale=10**6,
        ),
    ] = 0
    adapter_reads: Annotated[int, Counter("headrace_adapter_reads", "Adapters read from their folders into the pool on the host.")] = 0
    adapter_read_microseconds: Annotated[
        int, Counter("headrace_adapter_read_seconds", "Time of these reads, in which other requests are served.", scale=1e-6)
    ] = 0
    adapter_reads_failed: Annotated[
        int, Counter("headrace_adapter_reads_failed", "Reads of adapters that failed, with the requests that waited for them.")
    ] = 0
    adapter_evictions: Annotated[
        int, Counter("headrace_adapter_evictions", "Adapters that left the pool on the host to make room for others.")
    ] = 0
    expert_tokens: Annotated[
        int,
        Counter("headrace_expert_tokens", "Tokens that the experts of one layer computed, each once for every expert that it chose."),
    ] = 0
    hottest_expert_tokens: Annotated[
        dict[str, int],
        Counter(
            "headrace_hottest_expert_tokens",
            "Those of the expert of each layer that had the most since the engine started, as LAYER/EXPERT.",
            label="expert",
        ),
    ] = field(default_factory=dict)
    exchanges: Annotated[
        int, Counter("headrace_rank_exchanges", "Exchanges between the ranks of a replica, counted by each that takes part in one.")
    ] = 0
    exchanged_kilobytes: Annotated[
        int, Counter("headrace_rank_exchange_bytes", "What ranks wrote for other ranks in these exchanges.", scale=1000)
    ] = 0
    exchange_wait_microseconds: Annotated[
        int, Counter("headrace_rank_exchange_wait_seconds", "Time that ranks waited for other ranks in these exchanges.", scale=1e-6)
    ] = 0
    stage_idle_microseconds: Annotated[
        dict[str, int],
        Counter(
            "headrace_pipeline_stage_idle_seconds",
            "Time in which a stage of a pipeline had nothing to compute while there was a step in flight.",
            label="stage",
            scale=1e-6,
        ),
    ] = field(default_factory=dict)
    drafts: Annotated[
        int, Counter("headrace_spec_decode_drafts", "Rows whose drafted tokens were verified.", "vllm:spec_decode_num_drafts")
    ] = 0
    draft_tokens: Annotated[
        int, Counter("headrace_spec_decode_draft_tokens", "Drafted tokens that were verified.", "vllm:spec_decode_num_draft_tokens")
    ] = 0
    accepted_tokens: Annotated[
        int, Counter("headrace_spec_decode_accepted_tokens", "Drafted tokens that were right.", "vllm:spec_decode_num_accepted_tokens")
    ] = 0
    accepted_per_position: Annotated[
        dict[str, int],
        Counter(
            "headrace_spec_decode_accepted_tokens_per_pos",
            "Drafted tokens that were right, by their place among those of their row, from 0.",
            "vllm:spec_decode_num_accepted_tokens_per_pos",
            label="position",
        ),
    ] = field(default_factory=dict)
    steps_not_overlapped: Annotated[
        int,
        Counter("headrace_spec_decode_steps_not_overlapped", "Steps behind which none was planned, because speculation was on."),
    ] = 0
    finished: Annotated[
        dict[str, int],
        Counter("headrace_sequences_finished", "Sequences by finish reason, as the engine counts.", "vllm:request_success", label="reason"),
    ] = field(default_factory=dict)
    failures: Annotated[
        dict[str, int],
        Counter(
            "headrace_engine_failures",
            "What raised inside the engine, by kind; its log has the tracebacks.",
            label="kind",
            values=tuple(kind.value for kind in FailureKind),
        ),
    ] = field(default_factory=dict)
    step_seconds: float = 0.0
    step_buckets: list[int] = field(default_factory=lambda: [0] * (len(STEP_BOUNDS_S) + 1))

    def note_step(self, seconds: float) -> None:
        self.steps += 1
        self.step_seconds += seconds
        self.step_buckets[bisect_left(STEP_BOUNDS_S, seconds)] += 1

    def note_verified(self, num_drafts: int, num_accepted: int) -> None:
        self.drafts += 1
        self.draft_tokens += num_drafts
        self.accepted_tokens += num_accepted
        for place in map(str, range(num_accepted)):
            self.accepted_per_position[place] = self.accepted_per_position.get(place, 0) + 1

    def note_finished(self, reason: str) -> None:
        self.finished[reason] = self.finished.get(reason, 0) + 1

    def note_failure(self, kind: FailureKind) -> None:
        self.failures[kind.value] = self.failures.get(kind.value, 0) + 1

    def copy(self) -> EngineCounters:
        copied = EngineCounters(*_values(self))
        copied.step_buckets = list(self.step_buckets)
        for name in LABELLED_COUNTERS:
            setattr(copied, name, dict(getattr(self, name)))
        return copied


_values = attrgetter(*(row.name for row in fields(EngineCounters)))
_HINTS = get_type_hints(EngineCounters, include_extras=True)
COUNTERS: Mapping[str, Counter] = {name: hint.__metadata__[0] for name, hint in _HINTS.items() if get_origin(hint) is Annotated}
PLAIN_COUNTERS = tuple(name for name, counter in COUNTERS.items() if not counter.label)
LABELLED_COUNTERS = tuple(name for name, counter in COUNTERS.items() if counter.label)


class ClassLoad(NamedTuple):
    """As in `LoadSnapshot`, of one priority class."""

    num_running: int = 0
    num_waiting: int = 0
    num_queued_tokens: int = 0


ClassLoads = tuple[ClassLoad, ...]
"""One for each PriorityClass, in its order."""

NO_CLASS_LOADS: ClassLoads = (ClassLoad(),) * len(PriorityClass)


def summed(classes: ClassLoads) -> ClassLoad:
    return ClassLoad(*map(sum, zip(*classes, strict=True)))


def plus(classes: ClassLoads, others: ClassLoads) -> ClassLoads:
    return tuple(ClassLoad(*map(add, one, other)) for one, other in zip(classes, others, strict=True))


def minus(classes: ClassLoads, others: ClassLoads) -> ClassLoads:
    return tuple(ClassLoad(*map(sub, one, other)) for one, other in zip(classes, others, strict=True))


class GpuUse(NamedTuple):
    """utilization: 0..1 as nvidia-smi's utilization.gpu; None: NVML is not installed"""

    memory_used_bytes: int
    memory_total_bytes: int
    utilization: float | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class LoadSnapshot:
    """num_waiting         includes the sequences of requests that are still in the inbox
    num_queued_tokens   known tokens not planned yet: of waiting sequences, and the rest of prompts computed in chunks
    max_num_seqs        as configured, or fewer where goals of running sequences allow no more; 0: not known
    kv_blocks_*         summed over KV groups; free + cached + used == total
    step_age_s          of the running step; None when idle
    step_predicted_s    duration predicted for the running step
    step_fixed_s, step_token_s  a step of N tokens takes step_fixed_s + N * step_token_s, as fitted to recent steps, less what a step that
                        compiled took; both 0: not known
    step_prompt_tokens  most prompt tokens that a step can take within the running sequences' goals; 0: not known
    classes             empty: not known
    loop_age_s          since the loop last turned or woke (idle loops wake regularly)
    num_running_highest since the engine started
    cpu_s, resident_bytes  of the engine's process: processor seconds, and memory
    peak_*              what the device was measured to read and to compute at the engine's start; 0: not measured
    *_adapters          names: those that unfinished requests use, and those that requests wait for; max_loras: most used at once, 0: none
    adapter_pool_*      of the weights of adapters on the host, now and at most since the engine started; None: no adapters
    is_asleep           it takes no request: it sleeps, or will once its requests are finished
    gpu_*               None: there is no GPU, or for the utilization no NVML. gpu_utilization: 0..1
    """

    num_running: int
    num_waiting: int
    kv_blocks_free: int
    kv_blocks_cached: int
    kv_blocks_used: int
    kv_blocks_total: int
    counters: EngineCounters
    step_age_s: float | None = None
    step_predicted_s: float = 0.0
    loop_age_s: float = 0.0
    num_queued_tokens: int = 0
    max_num_seqs: int = 0
    step_fixed_s: float = 0.0
    step_token_s: float = 0.0
    step_prompt_tokens: int = 0
    classes: ClassLoads = ()
    num_running_highest: int = 0
    cpu_s: float = 0.0
    resident_bytes: int = 0
    peak_read_bytes_per_s: float = 0.0
    peak_flops_per_s: float = 0.0
    gpu_utilization: float | None = None
    gpu_memory_used_bytes: int | None = None
    gpu_memory_total_bytes: int | None = None
    running_adapters: tuple[str, ...] = ()
    waiting_adapters: tuple[str, ...] = ()
    max_loras: int = 0
    adapter_pool_bytes: int | None = None
    adapter_pool_highest_bytes: int | None = None
    is_asleep: bool = False

    @property
    def fill(self) -> float:
        """Running sequences of the most that the replica runs, or KV blocks that are held, where that is more."""
        sequences = self.num_running / self.max_num_seqs if self.max_num_seqs else 0.0
        if not (self.kv_blocks_total and self.num_running):  # an idle engine holds a block for padding
            return sequences
        return max(sequences, 1.0 - (self.kv_blocks_free + self.kv_blocks_cached) / self.kv_blocks_total)


@dataclass(slots=True)
class AttemptCounts:
    """What became of the requests that one gateway sent to a replica, since it lists the replica. The numbers only grow.

    num_lost      the replica, or the connection to it, ended before the answer
    num_failed    the engine could not go on: its fault
    num_refused   for what the request asks: its client's fault
    num_rejected  not taken by a replica that was full, or about to leave
    num_begun     had a first token; ttft_s: the sum of their seconds from being sent until then, ttft_s_squared: of the squares
    """

    num_sent: int = 0
    num_lost: int = 0
    num_failed: int = 0
    num_refused: int = 0
    num_rejected: int = 0
    num_begun: int = 0
    ttft_s: float = 0.0
    ttft_s_squared: float = 0.0

    @staticmethod
    def summed(counts: Iterable[AttemptCounts]) -> AttemptCounts:
        return AttemptCounts(*map(sum, zip(*map(astuple, (AttemptCounts(), *counts)), strict=True)))
