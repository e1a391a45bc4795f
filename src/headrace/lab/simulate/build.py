"""Builds simulated replicas from a model's shape, an engine's options and a source of step times.

The real loop and scheduler run over a runner that computes only how long each step takes.
"""

from __future__ import annotations

from array import array
from collections.abc import Callable, Collection
from dataclasses import dataclass, replace

from headrace.core.clock import Clock
from headrace.core.errors import ConfigError
from headrace.core.load import LoadSnapshot
from headrace.core.model_info import KvGroup, ModelInfo
from headrace.core.option import options
from headrace.core.parallelism import AUTO
from headrace.core.plan import Plan, Result
from headrace.core.request import EngineRequest
from headrace.core.update import Rejected, SequenceUpdate
from headrace.engine.build import assemble
from headrace.engine.config import EngineConfig, choose_device, resolve
from headrace.engine.loop import Engine
from headrace.engine.steps import Runner
from headrace.lab.simulate.step_times import step_s
from headrace.policy.placement.layout import Placement, choose_layout, why_not_run
from headrace.policy.placement.model import ModelShape
from headrace.policy.placement.need import Need
from headrace.policy.placement.roofline import Roofline, StepLatency

Update = SequenceUpdate | Rejected

Wait = Callable[[float], None]


class TimedRunner:
    """Every sampled token is 0."""

    def __init__(self, seconds_of: Callable[[Plan], float], wait: Wait) -> None:
        self._seconds_of = seconds_of
        self._wait = wait

    def submit(self, plan: Plan) -> TimedTicket:
        samples = plan.samples
        result = Result(step_id=plan.step_id, token_counts=array("i", samples), token_ids=array("i", bytes(4 * sum(samples))))
        return TimedTicket(result, self._seconds_of(plan), self._wait)

    def close(self) -> None:
        pass


class TimedTicket:
    def __init__(self, result: Result, seconds: float, wait: Wait) -> None:
        self._result, self._seconds, self._wait = result, seconds, wait

    def result(self) -> Result:
        self._wait(self._seconds)
        return self._result


class SimulatedReplica:
    """now     its own clock; a turn advances it by the step's time
    report  the load as of the beginning of the running step
    """

    def __init__(self, config: EngineConfig, info: ModelInfo, make_runner: Callable[[Clock, Wait], Runner], *, now: float = 0.0) -> None:
        self.now = now
        self._updates: list[Update] = []

        def clock() -> float:
            return self.now

        runner = make_runner(clock, self._pass)
        self.engine: Engine = assemble(config, runner, info, self._updates.extend, block_key="00" * 32, clock=clock)
        self.report: LoadSnapshot = self.engine.snapshot()

    def submit(self, request: EngineRequest, at: float) -> None:
        """A request that comes during a step is planned after it."""
        ends_at, self.now = self.now, at
        self.engine.submit(request)
        self.now = max(ends_at, at)

    def turn(self, at: float) -> list[Update] | None:
        """None if there was nothing to do."""
        self.now = at
        did_work = self.engine.turn()
        updates, self._updates[:] = list(self._updates), []
        if not did_work and not updates:
            self.report = self.engine.snapshot()
            return None
        return updates

    def _pass(self, seconds: float) -> None:
        self.report = self.engine.snapshot()
        self.now += seconds


VOCAB_SIZE = 2_000_000_012
"""Simulated ids only say which prompts begin alike."""


@dataclass(frozen=True, slots=True)
class SimulatedModel:
    """num_blocks: pad block included"""

    config: EngineConfig
    latency: StepLatency
    num_blocks: int
    max_model_len: int

    def replica(self, now: float) -> SimulatedReplica:
        return SimulatedReplica(
            self.config, self._info, lambda _, wait: TimedRunner(lambda plan: step_s(self.latency, plan), wait), now=now
        )

    @property
    def _info(self) -> ModelInfo:
        return ModelInfo(
            architecture="simulated",
            vocab_size=VOCAB_SIZE,
            max_model_len=self.max_model_len,
            eos_token_ids=(),
            kv_groups=(KvGroup(layers=(0,), kv_heads=1, head_dim=1, dtype_bytes=1),),  # only blocks are counted from here on
            block_size=self.config.block_size,
            num_blocks=(self.num_blocks,),
            dtype="none",
            weight_bytes=0,
        )


def planned_model(config: EngineConfig, need: Need, tp: int | None) -> tuple[SimulatedModel, Placement]:
    """tp: None: as the options say

    Raises ConfigError if no layout serves the model, or none holds the KV cache.
    """
    is_open = tp is None and config.tensor_parallel_size == AUTO
    wanted = config.tensor_parallel_size if tp is None else tp
    flat = [
        each
        for each in choose_layout(need)
        if each.layout.pp == 1 and (not why_not_run(need.device, each.layout) if is_open else each.layout.tp == wanted)
    ]
    if not flat:
        option = "tensor_parallel_size" if tp is None else "--tp"
        raise ConfigError(option, f"{need.device.name} has no layout of {wanted} devices", "A power of two, within one machine's links.")
    usable = [each for each in flat if each.batch]
    if not usable:
        remedy = "--tp N simulates a replica on several devices." if tp is None else ""
        raise ConfigError("--gpu" if tp is None else "--tp", flat[0].reason if tp is None else f"{tp}: {flat[0].reason}", remedy)
    best = next((each for each in usable if _num_blocks(config, need, each) * config.block_size <= each.resident_tokens), None)
    if best is None:
        most = max(usable, key=lambda each: each.resident_tokens)
        option = "kv_cache_bytes" if config.num_kv_blocks is None else "num_kv_blocks"
        reason = f"{getattr(config, option):,} do not fit: {most.layout} {need.device.name} holds {most.resident_tokens:,} tokens of KV"
        raise ConfigError(option, f"{reason}, {most.resident_tokens // config.block_size:,} blocks")
    latency = Roofline(need.model, need.device, best.layout, need.dtype, need.kv_dtype)
    config = replace(config, tensor_parallel_size=best.layout.tp)
    return _model(config, latency, _num_blocks(config, need, best), need.model), best


def _num_blocks(config: EngineConfig, need: Need, placement: Placement) -> int:
    if config.num_kv_blocks is not None:
        return config.num_kv_blocks
    if config.kv_cache_bytes is None:
        return placement.resident_tokens // config.block_size
    token_bytes = Roofline(need.model, need.device, placement.layout, need.dtype, need.kv_dtype).kv_bytes_per_token
    return int(config.kv_cache_bytes // (token_bytes * config.block_size))


def measured_model(config: EngineConfig, latency: StepLatency, shape: ModelShape, num_blocks: int) -> SimulatedModel:
    return _model(config, latency, config.num_kv_blocks or num_blocks, shape)


def _model(config: EngineConfig, latency: StepLatency, num_blocks: int, shape: ModelShape) -> SimulatedModel:
    held = (num_blocks - 1) * config.block_size
    if num_blocks < 2:
        reason = f"{max(0, num_blocks)} block(s) of {config.block_size:,} tokens hold nothing: the first one is padding"
        raise ConfigError("num_kv_blocks", reason, "Give more memory or blocks, or a smaller block_size.")
    if config.max_model_len is not None and config.max_model_len > held:
        raise ConfigError("max_model_len", f"{config.max_model_len:,} tokens do not fit the KV cache, which holds {held:,}")
    longest = min(config.max_model_len or shape.max_positions, held)
    return SimulatedModel(replace(config, num_kv_blocks=num_blocks), latency, num_blocks, longest)


MEASURED = (
    "dtype",
    "quantization",
    "kv_cache_dtype",
    "block_size",
    "memory_fraction",
    "kv_cache_bytes",
    "memory_bytes",
    "device",
    "tensor_parallel_size",
    "pipeline_parallel_size",
    "enable_expert_parallel",
    "kernels",
    "deterministic",
    "enforce_eager",
    "num_threads",
)
"""Options on which a step's time or the number of blocks depends: measured steps apply only to the same values."""


def on_device(config: EngineConfig, named: Collection[str], device: str) -> EngineConfig:
    """named: options that the file sets. Raises ConfigError."""
    kind = "cpu" if device == "cpu" else "cuda"
    if "device" in named and (own := choose_device(config.device)) != kind:
        raise ConfigError("device", f"{own} is not what --gpu {device} simulates", f"Write {kind}, or leave it out.")
    unset = {name: None for name, described in options(EngineConfig) if described.on and name not in named}
    checked = resolve(replace(config, **unset), kind)  # type: ignore[arg-type]
    if (stages := checked.pipeline_parallel_size) > 1:
        reason = f"{stages} is not simulated: stages compute steps at the same time"
        raise ConfigError("pipeline_parallel_size", reason, "Leave it out, or use --steps.")
    return checked


def check_measured(config: EngineConfig, measured: EngineConfig) -> None:
    """Raises ConfigError naming an option that differs."""
    for name in MEASURED:
        wanted, had = getattr(config, name), getattr(measured, name)
        if wanted != had:
            reason = f"{wanted} cannot be simulated with these steps: they were measured with {had}"
            raise ConfigError(name, reason, "Measure with it, by the flags of `headrace bench steps`.")
