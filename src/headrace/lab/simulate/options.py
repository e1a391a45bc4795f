"""Derives from an engine's options what a simulated replica has: its device, its defaults there, its dtypes and its memory.

Four options are not simulated on a device of the catalogue, since a roofline does not know them: `kernels`, `deterministic`,
`enforce_eager` and `num_threads`.
"""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import replace

from headrace.core.errors import ConfigError
from headrace.core.option import options
from headrace.engine.config import ROUNDINGS, EngineConfig
from headrace.policy.placement.device import Device
from headrace.policy.placement.model import ModelShape
from headrace.policy.placement.need import Need, Traffic

MEASURED = (
    "dtype",
    "quantization",
    "kv_cache_dtype",
    "block_size",
    "memory_fraction",
    "kv_cache_bytes",
    "device",
    "kernels",
    "deterministic",
    "enforce_eager",
    "num_threads",
)
"""Options that decide how long a step takes and how many blocks there are. Measured steps apply only to the same values."""

WEIGHT_DTYPES = {"float32": "fp32", "bfloat16": "bf16", "float16": "fp16"}
KV_DTYPES = {"bfloat16": "bf16", "int8": "int8", "fp8": "fp8"}


def on_device(config: EngineConfig, named: Collection[str], device: str) -> EngineConfig:
    """The engine options for simulating a device of the catalogue.

    named  options that the file sets; others may have another default on a GPU

    Raises ConfigError if the file names another device, or for values that no engine accepts.
    """
    kind = "cpu" if device == "cpu" else "cuda"
    if "device" in named and config.device != kind:
        raise ConfigError("device", f"{config.device} is not what --gpu {device} simulates", f"Write {kind}, or leave it out.")
    unset = {name: None for name, described in options(EngineConfig) if described.on and name not in named}
    return replace(config, device=kind, **unset).checked()  # type: ignore[arg-type]


def make_need(config: EngineConfig, shape: ModelShape, kept: str, device: Device, traffic: Traffic) -> Need:
    """The devices that a replica with these options needs. kept: dtype of the stored weights

    A cache whose blocks or bytes are set may fill the whole memory, as in the engine.
    """
    computed = WEIGHT_DTYPES.get(config.dtype, kept)
    is_small = kept not in WEIGHT_DTYPES.values()
    weights = config.quantization if config.quantization in ROUNDINGS else kept if is_small else computed
    names_cache = config.num_kv_blocks is not None or config.kv_cache_bytes is not None
    return Need(
        model=shape if weights == kept else replace(shape, stored=None),
        device=device,
        dtype=weights,
        kv_dtype=KV_DTYPES.get(config.kv_cache_dtype, "fp32" if computed == "fp32" else "bf16"),
        traffic=traffic,
        memory_fraction=1.0 if names_cache else config.memory_fraction,
    )


def check_measured(config: EngineConfig, measured: EngineConfig) -> None:
    """Raises ConfigError naming an option whose value differs from that of the measured engine."""
    for name in MEASURED:
        wanted, had = getattr(config, name), getattr(measured, name)
        if wanted != had:
            reason = f"{wanted} cannot be simulated with these steps: they were measured with {had}"
            raise ConfigError(name, reason, "Measure with it, by the flags of `headrace bench steps`.")
