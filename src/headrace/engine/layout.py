"""What the planner is asked about engines with given options, and what it decides where they leave it the layout."""

from __future__ import annotations

import json
import logging
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path

from headrace.core.errors import ConfigError, counted
from headrace.core.strict_decode import decode, plain
from headrace.engine.config import ROUNDINGS, EngineConfig
from headrace.machine.gpus import run_probe
from headrace.policy.placement.layout import Placement, choose_layout
from headrace.policy.placement.model import ModelShape
from headrace.policy.placement.need import Device, Need, Traffic, usual_traffic

log = logging.getLogger(__name__)

WEIGHT_DTYPES = {"float32": "fp32", "bfloat16": "bf16", "float16": "fp16"}
KV_DTYPES = {"bfloat16": "bf16", "int8": "int8", "fp8": "fp8"}


def make_need(config: EngineConfig, shape: ModelShape, kept: str, device: Device, traffic: Traffic) -> Need:
    """What the planner is asked for engines with these options. kept: dtype of the stored weights"""
    computed = WEIGHT_DTYPES.get(config.dtype, kept)
    is_small = kept not in WEIGHT_DTYPES.values()
    weights = config.quantization if config.quantization in ROUNDINGS else kept if is_small else computed
    names_cache = any(size is not None for size in (config.num_kv_blocks, config.kv_cache_bytes, config.memory_bytes))
    if config.memory_bytes is not None:
        device = replace(device, memory_bytes=min(device.memory_bytes, config.memory_bytes))
    return Need(
        model=shape if weights == kept else replace(shape, stored=None),
        device=device,
        dtype=weights,
        kv_dtype=KV_DTYPES.get(config.kv_cache_dtype, "fp32" if computed == "fp32" else "bf16"),
        traffic=traffic,
        memory_fraction=1.0 if names_cache else config.memory_fraction,
        max_num_seqs=config.max_num_seqs,
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class ShapeAsked:
    """most: tensor parallel sizes from 1 to it are tried"""

    folder: str
    quantization: str
    ep: bool
    most: int


@dataclass(frozen=True, slots=True)
class ShapeHere:
    """
    dtype    in which most linears are held, as `policy.placement.model.WEIGHT_BYTES` names it
    refused  tensor parallel size -> why execution refuses it
    """

    shape: ModelShape
    dtype: str
    refused: dict[str, str]


READ_S = 120.0
"""For importing torch, which takes long from a slow disk."""


def ask_shape(asked: ShapeAsked) -> ShapeHere:
    """In a process of its own: a supervisor has no use for torch, and other processes prepare for it first. Raises ConfigError."""
    output, error = run_probe(f"from headrace.engine.shapes import print_here\nprint_here({json.dumps(plain(asked))!r})", READ_S)
    said = output.rpartition("\n")[2]
    if not said.startswith("{"):
        raise ConfigError("tensor_parallel_size", f"auto cannot be decided: {(said or error).rstrip('.')}", "Give a number.")
    return decode(ShapeHere, json.loads(said))


@dataclass(frozen=True, slots=True)
class CpuMemory:
    """num_domains: NUMA nodes whose CPUs engines may use, within their quota; num_bytes: the memory of all of them"""

    num_domains: int
    num_bytes: int


def with_layout(
    config: EngineConfig,
    folder: Path,
    cpu: Device,
    memory: CpuMemory,
    num_replicas: int,
    ask: Callable[[ShapeAsked], ShapeHere] = ask_shape,
) -> EngineConfig:
    """The options with the number of ranks that the planner chooses for one of `num_replicas` replicas, which share this machine. It does
    not depend on what is free at the moment: a reload decides alike.

    cpu  one memory domain, but for its memory

    Raises ConfigError for a model that cannot be read.
    """
    most = max(1, memory.num_domains // num_replicas)
    if most == 1:
        whose = "this machine" if memory.num_domains == 1 else "a replica"
        return _decided(config, 1, f"since {whose} has CPU time for one memory domain (NUMA node), whose memory more ranks would divide")
    asked = ShapeAsked(
        folder=str(folder),
        quantization=config.quantization,
        ep=config.enable_expert_parallel,
        most=most,
    )
    here = ask(asked)
    domain = replace(cpu, memory_bytes=memory.num_bytes / num_replicas / most, link=replace(cpu.link, num_devices=most))
    need = make_need(config, here.shape, here.dtype, domain, usual_traffic(config.max_model_len or here.shape.max_positions))
    refused = {int(tp): reason for tp, reason in here.refused.items()}
    choices = choose_layout(replace(need, num_devices=most, max_replicas=1, max_stages=1, refused=refused))
    return _decided(config, choices[0].layout.tp, _why(*choices))


def _decided(config: EngineConfig, tp: int, why: str) -> EngineConfig:
    log.info("tensor_parallel_size = auto: %s, %s", counted(tp, "rank"), why)
    return replace(config, tensor_parallel_size=tp)


def _why(best: Placement, *others: Placement) -> str:
    if best.reason:  # the engine's start, which knows what is free, has the last word
        return f"and no number serves it by the planner: {best.reason}"
    planned = f"{best.full_tokens_per_s:,.0f} tokens/s by the planner, with a memory domain (NUMA node) for each"
    return "; ".join([planned, *(f"{each.layout}: {each.reason}" for each in others)])
