"""Replicas for the simulator, from a model's shape, an engine's options, and what says how long steps take."""

from __future__ import annotations

from dataclasses import dataclass, replace

from headrace.core.errors import ConfigError
from headrace.core.kvgroup import KvGroup
from headrace.core.model_info import ModelInfo
from headrace.engine.config import EngineConfig
from headrace.lab.simulate.replica import SimulatedReplica, TimedRunner
from headrace.lab.simulate.step_times import step_s
from headrace.policy.placement.layout import Need, Placement, judge, layouts
from headrace.policy.placement.model import ModelShape
from headrace.policy.placement.roofline import Roofline, StepLatency

VOCAB_SIZE = 2_000_000_012
"""Ids of simulated prompts lie below this, whatever the model's vocabulary is: they say which prompts begin alike, and nothing else."""


@dataclass(frozen=True, slots=True)
class SimulatedModel:
    """What replicas of one model are made from. latency: of one of them; num_blocks: of its KV cache, pad block included"""

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
            kv_groups=(KvGroup(layers=(0,), kv_heads=1, head_dim=1, dtype_bytes=1),),  # blocks are counted, their bytes were before
            block_size=self.config.block_size,
            num_blocks=(self.num_blocks,),
            dtype="none",
            weight_bytes=0,
        )


def planned_model(config: EngineConfig, need: Need, tp: int | None) -> tuple[SimulatedModel, Placement]:
    """A replica over `tp` devices, or over the fewest that it fits on, with its roofline. Raises ConfigError where there is no such one."""
    flat = [judge(need, layout) for layout in layouts(need) if layout.pp == 1 and tp in (None, layout.tp)]
    if not flat:
        raise ConfigError("--tp", f"{need.device.name} has no layout of {tp} devices", "A power of two, within one machine's links.")
    best = next((each for each in flat if each.num_sequences), flat[-1])
    if not best.num_sequences:
        raise ConfigError("--gpu", best.reason)
    latency = Roofline(need.model, need.device, best.layout, need.dtype, need.kv_dtype)
    num_blocks = config.num_kv_blocks or best.resident_tokens // config.block_size
    return _model(config, latency, num_blocks, need.model), best


def measured_model(config: EngineConfig, latency: StepLatency, shape: ModelShape, num_blocks: int) -> SimulatedModel:
    """A replica whose steps were measured. num_blocks: that the measured engine had, where the options name none"""
    return _model(config, latency, config.num_kv_blocks or num_blocks, shape)


def _model(config: EngineConfig, latency: StepLatency, num_blocks: int, shape: ModelShape) -> SimulatedModel:
    longest = min(config.max_model_len or shape.max_positions, (num_blocks - 1) * config.block_size)
    return SimulatedModel(replace(config, num_kv_blocks=num_blocks), latency, num_blocks, longest)
