"""What every rank of a replica does at its start: choose kernels and dtypes, load its part of the model, size and allocate its KV cache."""

from __future__ import annotations

import logging
import time
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, replace
from pathlib import Path

import torch

from headrace import __version__
from headrace.core.errors import ConfigError
from headrace.core.model_info import KvGroup
from headrace.core.parallelism import ALONE, Place
from headrace.engine.config import EngineConfig
from headrace.engine.kv_sizing import KvMemoryBudget, KvSizing, activation_bytes, describe_bytes, size_kv
from headrace.engine.runner.drafts.load import DraftDescription, LoadedDraft, describe_draft
from headrace.machine.resources import Available
from headrace.tensor.adapters.loader import AdapterLoader
from headrace.tensor.backends import choose_backend, load_backend, try_kernels
from headrace.tensor.batch import KvCache, allocate_kv, stored_as
from headrace.tensor.device import DEVICES
from headrace.tensor.host.cpu_features import CpuFeatures, read_cpu_features
from headrace.tensor.host.threads import ThreadPlan, plan_threads
from headrace.tensor.kernels import Backend
from headrace.tensor.kernels.filters import draw as plain_draw
from headrace.tensor.kernels.rounding import Precision
from headrace.tensor.models import LoadedModel, ModelDescription, describe, load_model
from headrace.tensor.packed.file import PackedFolder
from headrace.tensor.peers import NO_PEERS, Peers

log = logging.getLogger(__name__)

SHARED_OPTIONS = (
    "tensor_parallel_size",
    "pipeline_parallel_size",
    "enable_expert_parallel",
    "load_format",
    "seed",
    "max_model_len",
    "max_num_seqs",
    "max_num_batched_tokens",
    "enable_chunked_prefill",
    "block_size",
    "depth",
    "deterministic",
    "enable_lora",
    "max_loras",
    "max_cpu_loras",
    "max_lora_rank",
)
"""Equal on all ranks of a replica: they decide what is computed, and what a step may have."""


@dataclass(frozen=True, slots=True, kw_only=True)
class StartChoices:
    """
    drafting   of rank 0 alone, where a model drafts
    available  before any weight is loaded: other ranks, which load at the same time, wait for this one's hello
    """

    described: ModelDescription
    drafting: DraftDescription | None
    features: CpuFeatures
    dtype: torch.dtype
    why_dtype: str
    kv_dtype: torch.dtype
    why_kv: str
    why_kernels: str
    backend: Backend
    threads: ThreadPlan
    layer: str
    available: Available

    def lines(self, config: EngineConfig) -> tuple[str, ...]:
        return (
            f"device: {DEVICES[config.device].identity}{', no graphs are captured' if config.enforce_eager else ''}",
            f"dtype: {name_of(self.dtype)}, {self.why_dtype}",
            f"kernels: {self.backend.name}, {self.why_kernels}{_invariant(config)}{_compile_cache(self.backend)}",
            f"draw: {self._draw(is_alone=config.parallelism.world == 1)}",
            f"threads: {self.threads.num_threads}, {self.threads.reason}; threading layer of the kernels: {self.layer}",
            f"KV dtype: {name_of(self.kv_dtype)}, {self.why_kv}",
        )

    def _draw(self, *, is_alone: bool) -> str:
        if self.backend.choice is not None and is_alone:
            return "on the device"
        return "plain NumPy, slow for large vocabularies" if self.backend.draw is plain_draw else "compiled"

    def compiling_ahead(self) -> AbstractContextManager[None]:
        compiler = self.backend.compiler
        return nullcontext() if compiler is None else compiler.ahead(self.backend.packing.activation_dtype(self.dtype), self.kv_dtype)

    @property
    def kernels(self) -> str:
        return " ".join(filter(None, (self.backend.name, self.backend.numerics)))

    def facts(self, config: EngineConfig) -> dict[str, str]:
        """What has to be equal on all ranks of a replica, by name."""
        return {
            "Headrace": __version__,
            "dtype": name_of(self.dtype),
            "KV dtype": name_of(self.kv_dtype),
            "kernels": self.kernels,
            "weights": self.described.held.value,
            **{name: str(getattr(config, name)) for name in SHARED_OPTIONS},
        }


def _invariant(config: EngineConfig) -> str:
    return "; deterministic: a sequence's bits do not depend on its batch" if config.deterministic else ""


def _compile_cache(backend: Backend) -> str:
    return "" if backend.compiler is None else f"; {backend.compiler.kept()[1]}"


def choose(config: EngineConfig, packed: PackedFolder | None, features: CpuFeatures | None = None, place: Place = ALONE) -> StartChoices:
    """Sets the threads. Reads no weight. Raises ConfigError and CheckpointError, also if the weights do not fit the free memory."""
    device = DEVICES[config.device]
    device.check()
    try_kernels(config.kernels, config.device)
    features = features or read_cpu_features()
    described = describe(
        Path(config.model),
        max_model_len=config.max_model_len,
        quantization=config.quantization,
        has_fp8=device.has_fp8,
        place=place,
    )
    drafting = describe_draft(config, described) if place.rank == 0 else None
    for name, wanted in (("quantization", described.precision.value), ("kv_cache_dtype", config.kv_cache_dtype)):
        if wanted == "fp8" and not device.has_fp8:
            raise ConfigError(name, f"{device.title} does not compute fp8", "Use int8.")
    is_rounded = described.held in (Precision.INT8, Precision.INT4)
    dtype, why_dtype = device.resolve_dtype(config.dtype, described.dtype_name, features, is_rounded=is_rounded)
    kv_dtype, why_kv = _kv_dtype(config, dtype, described.dtype_name, features)
    draft_bytes = 0 if drafting is None else drafting.model.resident_bytes
    free, num_ranks = device.free_memory(), place.parallelism.num_here
    # Other ranks are taken to have read as much ahead: the one that has read the least decides, and it takes too little for free.
    available = replace(free, num_bytes=free.num_bytes + num_ranks * (0 if packed is None else packed.num_bytes_ahead))
    available = _within_option(config, available, num_ranks)
    _check_weights_fit(described, draft_bytes, available, num_ranks)
    kernels, why_kernels = choose_backend(config.kernels, config.device)
    backend = load_backend(kernels, deterministic=config.deterministic, features=features)
    threads = plan_threads(config.num_threads)
    return StartChoices(
        described=described,
        drafting=drafting,
        features=features,
        dtype=dtype,
        why_dtype=why_dtype,
        kv_dtype=kv_dtype,
        why_kv=why_kv,
        why_kernels=why_kernels,
        backend=backend,
        threads=threads,
        layer=backend.limit_threads(threads.num_threads),
        available=available,
    )


def _kv_dtype(config: EngineConfig, computed: torch.dtype, stored: str, features: CpuFeatures) -> tuple[torch.dtype, str]:
    """(dtype, why)"""
    if config.kv_cache_dtype == "auto":
        return DEVICES[config.device].default_kv_dtype(config.dtype, computed, stored, features)
    if config.kv_cache_dtype == "fp8":
        return torch.float8_e4m3fn, "as configured, without scales"
    scales = ", with a scale per token and head" if config.kv_cache_dtype == "int8" else ""
    return getattr(torch, config.kv_cache_dtype), f"as configured{scales}"


def _within_option(config: EngineConfig, free: Available, num_ranks: int, held_bytes: int = 0) -> Available:
    """num_ranks: that share this one's memory; held_bytes: of all these together"""
    if config.memory_bytes is None:
        return free
    given = Available(max(0, num_ranks * config.memory_bytes - held_bytes), "memory_bytes")
    return min(free, given, key=lambda available: available.num_bytes)


def _check_weights_fit(described: ModelDescription, draft_bytes: int, available: Available, num_ranks: int) -> None:
    """Raises ConfigError before loading: the system would kill the process halfway. Ranks have about the same part each."""
    if num_ranks * described.resident_bytes + draft_bytes > available.num_bytes:
        ranks = f" on each of {num_ranks} ranks" if num_ranks > 1 else ""
        draft = f" and {describe_bytes(draft_bytes)} of a draft model's" if draft_bytes else ""
        raise ConfigError(
            "model",
            f"{describe_bytes(described.resident_bytes)} of {described.dtype_name} weights{ranks}{draft} do not fit the "
            f"{describe_bytes(available.num_bytes)} that {available.source} leaves",
            f"Free memory or use a smaller model{', or no draft model' if draft_bytes else ''}.",
        )


def name_of(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


@dataclass(frozen=True, slots=True)
class LoadedPart:
    """A rank's part of the model.

    kv_groups  as stored, in kv_dtype
    available  `StartChoices.available`
    """

    loaded: LoadedModel
    kv_dtype: torch.dtype
    kv_groups: tuple[KvGroup, ...]
    available: Available

    @property
    def weights_digest(self) -> str:
        """Empty: it is not known."""
        return "" if self.loaded.weights is None else self.loaded.weights.known

    def adapter_loader(self, config: EngineConfig) -> AdapterLoader | None:
        adapters = self.loaded.model.adapters
        return None if adapters is None else AdapterLoader(adapters, config.max_lora_rank)

    def budget(self, config: EngineConfig, loader: AdapterLoader | None, draft: LoadedDraft | None = None) -> KvMemoryBudget:
        device, loaded, num_ranks = DEVICES[config.device], self.loaded, self.loaded.model.place.parallelism.num_here
        models = [loaded.model] if draft is None else [loaded.model, draft.loaded.model]
        itemsize = device.step_itemsize(loaded.model.activations)
        widest = max(each.hidden_size for each in models)  # they compute one after the other
        step_bytes = activation_bytes(config, widest, loaded.vocab_size, loaded.max_model_len, itemsize, num_ranks)
        step_bytes += sum(each.recorded_bytes for each in models)
        weight_bytes, draft_bytes = loaded.resident_bytes, 0 if draft is None else draft.loaded.resident_bytes // num_ranks
        free = device.free_memory()
        if num_ranks > 1:  # how much of the others' weights it still counts is not known
            free = replace(self.available, num_bytes=max(0, self.available.num_bytes - num_ranks * (weight_bytes + draft_bytes)))
        free = _within_option(config, free, num_ranks, num_ranks * (weight_bytes + draft_bytes))
        return KvMemoryBudget(
            available_bytes=free.num_bytes,
            source=free.source,
            weight_bytes=weight_bytes,
            activation_bytes=step_bytes + device.working_bytes(config.max_num_seqs, loaded.vocab_size),
            adapter_bytes=0 if loader is None else config.num_cpu_loras * loader.max_bytes + loader.max_file_bytes,
            draft_bytes=draft_bytes,
            num_ranks=num_ranks,
        )

    def size(
        self, config: EngineConfig, budget: KvMemoryBudget, draft_groups: tuple[KvGroup, ...] = (), *, most: int | None = None
    ) -> KvSizing:
        """most: blocks of a full-attention group that fit every rank; None: this one alone"""
        return size_kv(config, self.kv_groups, self.loaded.max_model_len, budget, draft_groups, most)

    def allocate(self, config: EngineConfig, sizing: KvSizing) -> KvCache:
        model = self.loaded.model
        return allocate_kv(model.kv_shapes, model.group_of, sizing.num_blocks, config.block_size, self.kv_dtype, DEVICES[config.device])


def load_part(
    config: EngineConfig, choices: StartChoices, packed: PackedFolder | None, place: Place = ALONE, peers: Peers = NO_PEERS
) -> LoadedPart:
    log.info("loading %s", config.model)
    began = time.perf_counter()
    try:
        loaded = load_model(
            Path(config.model),
            backend=choices.backend,
            dtype=choices.dtype,
            device=DEVICES[config.device],
            load_format=config.load_format,
            seed=config.seed,
            max_model_len=config.max_model_len,
            quantization=config.quantization,
            packed=packed,
            enable_lora=config.enable_lora,
            place=place,
            peers=peers,
        )
    except torch.OutOfMemoryError as error:
        reason = "the device's memory ran out while weights were loaded and packed"
        raise ConfigError("model", reason, "Free the device's memory, or use a smaller model or --quantization.") from error
    log.info("loaded %s of weights in %.1f s", describe_bytes(loaded.resident_bytes), time.perf_counter() - began)
    groups = tuple(stored_as(group, choices.kv_dtype) for group in loaded.model.kv_groups)
    return LoadedPart(loaded, choices.kv_dtype, groups, choices.available)
