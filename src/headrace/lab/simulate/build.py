"""Builds replicas for the simulator from a model's shape, an engine's options, and a source of step times."""

from __future__ import annotations

from dataclasses import dataclass, replace

from headrace.core.errors import ConfigError
from headrace.core.kvgroup import KvGroup
from headrace.core.model_info import ModelInfo
from headrace.core.parallelism import why_not_run
from headrace.engine.config import EngineConfig
from headrace.lab.simulate.replica import SimulatedReplica, TimedRunner
from headrace.lab.simulate.step_times import step_s
from headrace.policy.placement.layout import Placement, choose_layout
from headrace.policy.placement.model import ModelShape
from headrace.policy.placement.need import Need
from headrace.policy.placement.roofline import Roofline, StepLatency

VOCAB_SIZE = 2_000_000_012
"""Ids of simulated prompts are below this, whatever the model's vocabulary: ids only say which prompts begin alike."""


@dataclass(frozen=True, slots=True)
class SimulatedModel:
    """The model of which simulated replicas are made. latency: of one replica; num_blocks: of its KV cache, pad block included"""

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
    """A model on the roofline of `tp` devices, or of those that this version runs, and its placement. Pipelines are not simulated.

    Raises ConfigError if no layout serves the model, or none holds the KV cache that the options ask for.
    """
    flat = [each for each in choose_layout(need) if each.layout.pp == 1 and _is_meant(each.layout.tp, tp)]
    if not flat:
        raise ConfigError("--tp", f"{need.device.name} has no layout of {tp} devices", "A power of two, within one machine's links.")
    usable = [each for each in flat if each.batch]
    if not usable:
        remedy = "--tp N simulates a replica on several devices, which this version does not run." if tp is None else ""
        raise ConfigError("--gpu" if tp is None else "--tp", flat[0].reason, remedy)
    best = next((each for each in usable if _num_blocks(config, need, each) * config.block_size <= each.resident_tokens), None)
    if best is None:
        most = max(usable, key=lambda each: each.resident_tokens)
        option = "kv_cache_bytes" if config.num_kv_blocks is None else "num_kv_blocks"
        reason = f"{getattr(config, option):,} do not fit: {most.layout} {need.device.name} holds {most.resident_tokens:,} tokens of KV"
        raise ConfigError(option, f"{reason}, {most.resident_tokens // config.block_size:,} blocks")
    latency = Roofline(need.model, need.device, best.layout, need.dtype, need.kv_dtype)
    return _model(config, latency, _num_blocks(config, need, best), need.model), best


def _is_meant(tp: int, asked: int | None) -> bool:
    return not why_not_run(tp) if asked is None else tp == asked


def _num_blocks(config: EngineConfig, need: Need, placement: Placement) -> int:
    if config.num_kv_blocks is not None:
        return config.num_kv_blocks
    if config.kv_cache_bytes is None:
        return placement.resident_tokens // config.block_size
    token_bytes = Roofline(need.model, need.device, placement.layout, need.dtype, need.kv_dtype).kv_bytes_per_token
    return int(config.kv_cache_bytes // (token_bytes * config.block_size))


def measured_model(config: EngineConfig, latency: StepLatency, shape: ModelShape, num_blocks: int) -> SimulatedModel:
    """A model with measured step times. num_blocks: the measured engine's, used if the options set none"""
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
