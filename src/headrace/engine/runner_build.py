"""From a configuration to a runner that is ready, and what was decided on the way, for people to read at start."""

from __future__ import annotations

from pathlib import Path

import torch

from headrace.core.digests import TEXT_FILES, text_digests
from headrace.core.errors import ConfigError
from headrace.core.model_info import ModelInfo
from headrace.engine.config import EngineConfig
from headrace.engine.kv_sizing import Budget, KvSizing, activation_bytes, describe_bytes, size_kv
from headrace.engine.memory import Available, read_available
from headrace.engine.runner import ModelRunner, OverlappedRunner
from headrace.engine.warmup import warm_up
from headrace.tensor.batch import KvCache, allocate_kv
from headrace.tensor.kernels import Kernels, load_kernels
from headrace.tensor.models import LoadedModel, ModelDescription, describe, load_model

_DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}


def build_runner(config: EngineConfig) -> tuple[ModelRunner | OverlappedRunner, ModelInfo]:
    """Choose threads, dtype and kernels, load the weights, size and reserve the KV cache, warm up.

    Raises: ConfigError, CheckpointError; before any weight is read where that can be known.
    """
    folder = Path(config.model)
    _check_device(config.device)
    found = describe(folder, max_model_len=config.max_model_len)
    dtype, dtype_line = _resolve_dtype(config, found.dtype_name)
    found = describe(folder, dtype=dtype, max_model_len=config.max_model_len)
    _check_weights_fit(config, found, read_memory(config.device))
    kernels, kernels_line = _choose_kernels(config)
    threads_line = _apply_threads(config)
    loaded = load_model(
        folder,
        kernels=kernels,
        dtype=dtype,
        device=config.device,
        load_format=config.load_format,
        seed=config.seed,
        max_model_len=config.max_model_len,
    )
    sizing = _size(config, loaded)
    kv = _allocate(config, loaded, sizing)
    runner = _make_runner(config, loaded, sizing, kv)
    try:
        seconds = warm_up(runner, config, max_model_len=sizing.max_model_len, vocab_size=loaded.vocab_size)
    except BaseException:
        runner.close()
        raise
    kv.clear_pad_block()
    model_line = f"model: {loaded.architecture} from {config.model}, {describe_bytes(loaded.resident_bytes)} of weights"
    warm_line = f"warm-up: {seconds:.1f} s"
    decided = (model_line, threads_line, dtype_line, kernels_line, *sizing.lines, warm_line)
    return runner, _model_info(config, folder, loaded, sizing, decided)


def read_memory(device: str) -> Available:
    """What may still be taken on the device that holds weights and KV."""
    if device == "cuda":
        return Available(torch.cuda.mem_get_info()[0], "the GPU")
    return read_available()


def _check_device(device: str) -> None:
    if device == "cuda" and not torch.cuda.is_available():
        raise ConfigError("device", "'cuda': torch sees no GPU here", "Use cpu.")


def _check_weights_fit(config: EngineConfig, found: ModelDescription, available: Available) -> None:
    """Refuse before loading what would only be killed halfway."""
    if found.resident_bytes > available.num_bytes:
        raise ConfigError(
            "model",
            f"{describe_bytes(found.resident_bytes)} of {found.dtype_name} weights do not fit the "
            f"{describe_bytes(available.num_bytes)} that {available.source} leaves",
            "Free memory or use a smaller model.",
        )


def _size(config: EngineConfig, loaded: LoadedModel) -> KvSizing:
    available = read_memory(config.device)
    budget = Budget(
        available_bytes=available.num_bytes,
        source=available.source,
        weight_bytes=loaded.resident_bytes,
        activation_bytes=activation_bytes(config, loaded.model.spec.hidden_size, loaded.vocab_size),
    )
    return size_kv(config, loaded.model.kv_groups, loaded.max_model_len, budget)


def _allocate(config: EngineConfig, loaded: LoadedModel, sizing: KvSizing) -> KvCache:
    model = loaded.model
    return allocate_kv(model.kv_shapes, model.group_of, sizing.num_blocks, config.block_size, loaded.dtype, config.device)


def _make_runner(config: EngineConfig, loaded: LoadedModel, sizing: KvSizing, kv: KvCache) -> ModelRunner | OverlappedRunner:
    runner = ModelRunner(
        loaded.model,
        kv,
        max_num_seqs=config.max_num_seqs,
        max_model_len=sizing.max_model_len,
        eos_token_ids=loaded.eos_token_ids,
        device=config.device,
    )
    return OverlappedRunner(runner) if config.depth > 1 else runner


def _model_info(config: EngineConfig, folder: Path, loaded: LoadedModel, sizing: KvSizing, decided: tuple[str, ...]) -> ModelInfo:
    texts = {name: (folder / name).read_bytes() for names in TEXT_FILES.values() for name in names if (folder / name).is_file()}
    return ModelInfo(
        architecture=loaded.architecture,
        vocab_size=loaded.vocab_size,
        max_model_len=sizing.max_model_len,
        eos_token_ids=loaded.eos_token_ids,
        kv_groups=loaded.model.kv_groups,
        block_size=config.block_size,
        num_blocks=sizing.num_blocks,
        dtype=str(loaded.dtype).removeprefix("torch."),
        weight_bytes=loaded.weight_bytes,
        sampling_defaults=loaded.sampling_defaults,
        digests={"model": loaded.model_digest, **text_digests(texts)},
        decided=decided,
    )


def _resolve_dtype(config: EngineConfig, stored: str) -> tuple[torch.dtype, str]:
    """The dtype to compute with, and why."""
    if config.dtype != "auto":
        return _DTYPES[config.dtype], f"dtype: {config.dtype}, as configured"
    if stored == "bfloat16" and config.device == "cpu" and not torch.ops.mkldnn._is_mkldnn_bf16_supported():
        return torch.float32, "dtype: float32; the checkpoint is bfloat16, which this CPU computes in software"
    return _DTYPES[stored], f"dtype: {stored}, as the checkpoint says"


def _choose_kernels(config: EngineConfig) -> tuple[Kernels, str]:
    if config.kernels != "auto" or config.device != "cpu":
        name = "reference" if config.kernels == "auto" else config.kernels
        return load_kernels(name), f"kernels: {name}" + (", as configured" if config.kernels != "auto" else f", for {config.device}")
    try:
        return load_kernels("numba"), "kernels: numba"
    except ImportError as error:
        return load_kernels("reference"), f"kernels: reference; numba cannot be imported ({error})"


def _apply_threads(config: EngineConfig) -> str:
    if config.num_threads is not None:
        torch.set_num_threads(config.num_threads)
        return f"threads: {config.num_threads}, as configured"
    return f"threads: {torch.get_num_threads()}, as torch chose"
