"""Builds a runner from an engine's configuration, and logs every choice in words."""

from __future__ import annotations

import logging
import re
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from importlib import import_module
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import NamedTuple

import torch

from headrace import __version__
from headrace.core.errors import ConfigError
from headrace.core.load import GpuUse
from headrace.core.model_info import TEXT_FILES, WEIGHTS, KvGroup, ModelInfo, text_digests
from headrace.engine.adapters.preparer import AdapterPreparer
from headrace.engine.config import EngineConfig
from headrace.engine.grammar.preparer import GrammarCompiler, GrammarPreparer
from headrace.engine.grammar.slots import SlotGrammars
from headrace.engine.grammar.store import GrammarStore
from headrace.engine.kv_sizing import KvMemoryBudget, KvSizing, activation_bytes, describe_bytes, out_of_memory, size_kv, step_tokens
from headrace.engine.runner.batch import Resident
from headrace.engine.runner.device.adapters import NO_PLACES, DevicePlaces
from headrace.engine.runner.device.runner import DeviceRunner
from headrace.engine.runner.drafts import MakeDrafter
from headrace.engine.runner.drafts.load import DraftDescription, LoadedDraft, describe_draft, load_draft
from headrace.engine.runner.drafts.lookup import make_lookup
from headrace.engine.runner.masks import load_mask_kernel
from headrace.engine.runner.model_runner import ModelRunner, OverlappedRunner
from headrace.engine.runner.warmup import log_compiling, warm_up
from headrace.machine.resources import Available
from headrace.tensor.adapters.loader import AdapterLoader
from headrace.tensor.backends import choose_backend, load_backend, try_kernels
from headrace.tensor.batch import KvCache, PackedAdapter, allocate_kv, stored_as
from headrace.tensor.device import DEVICES
from headrace.tensor.host.cpu_features import CpuFeatures, read_cpu_features
from headrace.tensor.host.threads import ThreadPlan, plan_threads
from headrace.tensor.kernels import Backend, LowRankUpdate
from headrace.tensor.kernels.filters import draw as plain_draw
from headrace.tensor.kernels.rounding import Precision
from headrace.tensor.launches import EagerLaunches
from headrace.tensor.layers.adapted import ModelAdapters
from headrace.tensor.layers.rope import LinearScaling
from headrace.tensor.models import LoadedModel, ModelDescription, describe, load_model
from headrace.tensor.models.spec import DecoderSpec
from headrace.tensor.packed.file import PackedFolder
from headrace.tensor.packed.store import Pieces
from headrace.tensor.peaks import Peaks, measure_peaks

log = logging.getLogger(__name__)


AnyRunner = ModelRunner | OverlappedRunner | DeviceRunner


class Built(NamedTuple):
    """A runner that is ready, with what belongs to its model.

    weights    hashes all weights; None: `info` holds the digest already
    """

    runner: AnyRunner
    info: ModelInfo
    weights: Callable[[], str] | None
    preparer: GrammarPreparer
    adapters: AdapterPreparer[PackedAdapter] | None
    unwritten: Pieces | None
    read_gpu: Callable[[], GpuUse | None]


def build_runner(
    config: EngineConfig, packed: PackedFolder | None = None, features: CpuFeatures | None = None
) -> tuple[AnyRunner, ModelInfo]:
    return build(config.checked(), packed, features)[:2]


def build(config: EngineConfig, packed: PackedFolder | None = None, features: CpuFeatures | None = None) -> Built:
    """Raises: ConfigError, CheckpointError; before any weight is read where that is possible."""
    device = DEVICES[config.device]
    device.check()
    try_kernels(config.kernels, config.device)
    described = describe(Path(config.model), max_model_len=config.max_model_len, quantization=config.quantization, has_fp8=device.has_fp8)
    drafting = describe_draft(config, described)
    choices = _choose(config, described, drafting, packed, features or read_cpu_features())
    with log_compiling(choices.backend.compiler):
        loaded = _load(config, choices, packed)
        peaks = measure_peaks(config.device, choices.dtype)
        kv_dtype, why_kv = _kv_dtype(config, choices.dtype, described.dtype_name, choices.features)
        groups = tuple(stored_as(group, kv_dtype) for group in loaded.model.kv_groups)
        draft = None if drafting is None else load_draft(drafting, config, choices.backend, choices.dtype, kv_dtype)
        loader = _adapter_loader(config, loaded)
        sizing = _size(config, loaded, groups, 0 if loader is None else loader.max_bytes, draft)
        adapters = None if loader is None else _read_adapters(config, loader, loaded)
        compiler = GrammarCompiler(Path(config.model), loaded.vocab_size, loaded.eos_token_ids)
        grammars = GrammarStore(compiler)
        with _memory_errors_named(sizing), ExitStack() as unless_ready:
            kv = allocate_kv(loaded.model.kv_shapes, loaded.model.group_of, sizing.num_blocks, config.block_size, kv_dtype, device)
            resident = None if adapters is None else adapters.resident
            drafter = _lookup(config) if draft is None else draft.allocate(sizing.num_blocks, config)
            runner = _make_runner(config, loaded, sizing, kv, choices.backend, SlotGrammars(grammars), resident, drafter)
            unless_ready.callback(runner.close)
            load_mask_kernel(choices.backend.mask)
            seconds = _warm_up(runner, config, sizing, loaded)
            unless_ready.pop_all()
    kv.clear_pad_block()
    unwritten = None if loaded.store is None else loaded.store.save()  # only now: it holds the weights, which a failed start must release
    decided = (
        f"model: {loaded.architecture} from {config.model}, {describe_bytes(loaded.resident_bytes)} of weights{_rounded(loaded)}",
        *(() if draft is None else (draft.line,)),
        *choices.lines(config),
        *(f"LongRoPE: {choice}" for choice in _longrope(loaded).values()),
        *_linear_scaling(loaded.model.spec),
        f"KV dtype: {_name(kv_dtype)}, {why_kv}",
        *sizing.lines,
        *_adapter_lines(config, loader, adapters),
        *_speculation_lines(config),
        f"peaks, as measured: {peaks.read_bytes_per_s / 1e9:.1f} GB/s, {peaks.flops_per_s / 1e12:.2f} TFLOP/s",
        f"warm-up: {seconds:.1f} s",
    )
    numerics = _numerics(config, choices, loaded, _name(kv_dtype))
    weights = None if numerics[WEIGHTS] or loaded.weights is None else loaded.weights.compute
    info = _model_info(config, loaded, groups, sizing, _name(kv_dtype), decided, numerics, peaks)
    info = info if adapters is None else info.with_adapters(adapters.digests)
    return Built(runner, info, weights, GrammarPreparer(compiler, grammars), adapters, unwritten, device.read_gpu)


@dataclass(frozen=True, slots=True, kw_only=True)
class _Choices:
    features: CpuFeatures
    dtype: torch.dtype
    why_dtype: str
    why_kernels: str
    backend: Backend
    threads: ThreadPlan
    layer: str

    def lines(self, config: EngineConfig) -> tuple[str, ...]:
        return (
            f"device: {DEVICES[config.device].identity}{', no graphs are captured' if config.enforce_eager else ''}",
            f"dtype: {_name(self.dtype)}, {self.why_dtype}",
            f"kernels: {self.backend.name}, {self.why_kernels}{_invariant(config)}{_compile_cache(self.backend)}",
            f"draw: {self._draw()}",
            f"threads: {self.threads.num_threads}, {self.threads.reason}; threading layer of the kernels: {self.layer}",
        )

    def _draw(self) -> str:
        if self.backend.choice is not None:
            return "on the device"
        return "plain NumPy, slow for large vocabularies" if self.backend.draw is plain_draw else "compiled"


def _choose(
    config: EngineConfig,
    described: ModelDescription,
    drafting: DraftDescription | None,
    packed: PackedFolder | None,
    features: CpuFeatures,
) -> _Choices:
    """Sets the threads. Raises ConfigError, also if the weights do not fit the free memory."""
    device, is_rounded = DEVICES[config.device], described.held in (Precision.INT8, Precision.INT4)
    for name, wanted in (("quantization", described.precision.value), ("kv_cache_dtype", config.kv_cache_dtype)):
        if wanted == "fp8" and not device.has_fp8:
            raise ConfigError(name, f"{device.title} does not compute fp8", "Use int8.")
    dtype, why_dtype = device.resolve_dtype(config.dtype, described.dtype_name, features, is_rounded=is_rounded)
    draft_bytes = 0 if drafting is None else drafting.model.resident_bytes
    _check_weights_fit(described, draft_bytes, device.free_memory(), 0 if packed is None else packed.num_bytes_ahead)
    kernels, why_kernels = choose_backend(config.kernels, config.device)
    backend = load_backend(kernels, deterministic=config.deterministic, features=features)
    threads = plan_threads(config.num_threads)
    layer = backend.limit_threads(threads.num_threads)
    return _Choices(
        features=features,
        dtype=dtype,
        why_dtype=why_dtype,
        why_kernels=why_kernels,
        backend=backend,
        threads=threads,
        layer=layer,
    )


def _load(config: EngineConfig, choices: _Choices, packed: PackedFolder | None) -> LoadedModel:
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
        )
    except torch.OutOfMemoryError as error:
        reason = "the device's memory ran out while weights were loaded and packed"
        raise ConfigError("model", reason, "Free the device's memory, or use a smaller model or --quantization.") from error
    log.info("loaded %s of weights in %.1f s", describe_bytes(loaded.resident_bytes), time.perf_counter() - began)
    return loaded


def _numerics(config: EngineConfig, choices: _Choices, loaded: LoadedModel, kv_dtype: str) -> dict[str, str]:
    backend = choices.backend
    return {
        WEIGHTS: loaded.model_digest if loaded.weights is None else loaded.weights.known,
        "quantization": loaded.held if loaded.stored_as else loaded.precision.value,
        "dtype": _name(loaded.dtype),
        "KV dtype": kv_dtype,
        "kernels": " ".join(filter(None, (backend.name, backend.numerics))),
        "device": DEVICES[config.device].identity,
        "CPU": f"{choices.features.machine} {choices.features.family}",
        # Headrace's own kernels give the same bits with any number of threads; a library's may not.
        "threads": "any" if config.deterministic else str(choices.threads.num_threads),
        "deterministic": str(config.deterministic),
        "versions": _versions(backend),
        **_longrope(loaded),
    }


def _longrope(loaded: LoadedModel) -> dict[str, str]:
    spec = loaded.model.spec
    if spec.longrope is None:
        return {}
    is_long = spec.longrope.is_long(spec.max_positions)
    trained = spec.longrope.original_positions
    short = f"short factors, max_model_len is at most {trained}; a larger one takes the long factors for all sequences"
    return {"LongRoPE": f"long factors for all sequences, max_model_len is above {trained}" if is_long else short}


def _linear_scaling(spec: DecoderSpec) -> list[str]:
    """Notes that config.json does not say whether max_position_embeddings includes the factor."""
    scalings = [layer.attention.rope.scaling for layer in spec.layers]
    longer = [scaling for scaling in scalings if isinstance(scaling, LinearScaling) and scaling.original_positions < spec.max_positions]
    if not longer:
        return []
    trained, remedy = longer[0].original_positions, "if the model's card counts the factor in them, set max_model_len to"
    return [f"linear scaling: {trained} positions x factor {longer[0].factor:g}; {remedy} {trained}"]


def _kv_dtype(config: EngineConfig, computed: torch.dtype, stored: str, features: CpuFeatures) -> tuple[torch.dtype, str]:
    """(dtype, why)"""
    if config.kv_cache_dtype == "auto":
        return DEVICES[config.device].default_kv_dtype(config.dtype, computed, stored, features)
    if config.kv_cache_dtype == "fp8":
        return torch.float8_e4m3fn, "as configured, without scales"
    scales = ", with a scale per token and head" if config.kv_cache_dtype == "int8" else ""
    return getattr(torch, config.kv_cache_dtype), f"as configured{scales}"


def _name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


def _versions(backend: Backend) -> str:
    packages = ("llguidance", *(() if backend.compiler is None else backend.compiler.packages))
    return ", ".join([f"headrace {__version__}", f"torch {torch.__version__}", *(f"{name} {_version(name)}" for name in packages)])


def _version(package: str) -> str:
    """`__version__` is for a package whose distribution has another name (pytorch-triton)."""
    try:
        return version(package)
    except PackageNotFoundError:
        return str(import_module(package).__version__)


def _rounded(loaded: LoadedModel) -> str:
    stored = f", stored as {loaded.stored_as} ({loaded.held})" if loaded.stored_as else ""
    return stored if loaded.precision is Precision.NONE else f"{stored}, linears rounded to {loaded.precision.value}"


def _check_weights_fit(described: ModelDescription, draft_bytes: int, available: Available, num_bytes_ahead: int) -> None:
    """Raises ConfigError before loading: the system would kill the process halfway."""
    if described.resident_bytes + draft_bytes > available.num_bytes + num_bytes_ahead:
        draft = f" and {describe_bytes(draft_bytes)} of a draft model's" if draft_bytes else ""
        raise ConfigError(
            "model",
            f"{describe_bytes(described.resident_bytes)} of {described.dtype_name} weights{draft} do not fit the "
            f"{describe_bytes(available.num_bytes + num_bytes_ahead)} that {available.source} leaves",
            f"Free memory or use a smaller model{', or no draft model' if draft_bytes else ''}.",
        )


def _adapter_loader(config: EngineConfig, loaded: LoadedModel) -> AdapterLoader | None:
    adapters = loaded.model.adapters
    return None if adapters is None else AdapterLoader(adapters.linears, adapters.kernels, config.max_lora_rank)


def _read_adapters(config: EngineConfig, loader: AdapterLoader, loaded: LoadedModel) -> AdapterPreparer[PackedAdapter]:
    """Warm-up runs steps with an adapter of zeros. Raises CheckpointError for a listed adapter that cannot be loaded."""
    adapters = AdapterPreparer(loader, max_loras=config.max_loras, max_cpu_loras=config.num_cpu_loras, max_num_seqs=config.max_num_seqs)
    adapters.set(config.lora_modules)
    assert loaded.model.adapters is not None
    adapters.put_first(_adapter_of_zeros(loaded.model.adapters))
    return adapters


def _adapter_of_zeros(adapters: ModelAdapters) -> PackedAdapter:
    return adapters.kernels.pack(
        [
            [
                LowRankUpdate(down=torch.zeros(1, linear.in_features), up=torch.zeros(part.rows, 1), scale=1.0, first_row=part.first_row)
                for part in linear.parts_of_output
            ]
            for linear in adapters.linears
        ]
    )


def _speculation_lines(config: EngineConfig) -> list[str]:
    if config.speculative_config is None:
        return []
    return [f"speculation: {config.speculative_config.method}, at most {config.speculative_config.num_speculative_tokens} drafted tokens"]


def _adapter_lines(config: EngineConfig, loader: AdapterLoader | None, adapters: AdapterPreparer[PackedAdapter] | None) -> list[str]:
    if loader is None or adapters is None:
        return []
    size = f"at most {describe_bytes(loader.max_bytes)} each (rank {config.max_lora_rank})"
    return [f"adapters: {len(adapters.digests)}, {config.max_loras} in use at once, {config.num_cpu_loras} in memory, {size}"]


def _size(
    config: EngineConfig, loaded: LoadedModel, groups: tuple[KvGroup, ...], adapter_bytes: int, draft: LoadedDraft | None
) -> KvSizing:
    device, model = DEVICES[config.device], loaded.model
    models = [model] if draft is None else [model, draft.loaded.model]
    available, itemsize = device.free_memory(), device.step_itemsize(model.activations)
    widest = max(each.hidden_size for each in models)  # they compute one after the other
    step_bytes = activation_bytes(config, widest, loaded.vocab_size, loaded.max_model_len, itemsize)
    step_bytes += sum(each.recorded_bytes for each in models)
    budget = KvMemoryBudget(
        available_bytes=available.num_bytes,
        source=available.source,
        weight_bytes=loaded.resident_bytes,
        activation_bytes=step_bytes + device.working_bytes(config.max_num_seqs, loaded.vocab_size),
        adapter_bytes=(config.num_cpu_loras + 1) * adapter_bytes,
        draft_bytes=0 if draft is None else draft.loaded.resident_bytes,
    )
    return size_kv(config, groups, loaded.max_model_len, budget, () if draft is None else draft.kv_groups)


@contextmanager
def _memory_errors_named(sizing: KvSizing) -> Iterator[None]:
    try:
        yield
    except RuntimeError as error:  # torch's, the device's own, and Triton's: each says so in words
        if "out of memory" not in str(error):
            raise
        match = re.search(r"Tried to allocate ([\d.]+) ([KMG])iB", str(error))
        wanted = int(float(match.group(1)) * {"K": 2**10, "M": 2**20, "G": 2**30}[match.group(2)]) if match else 0
        raise out_of_memory(sizing, wanted) from error


def _invariant(config: EngineConfig) -> str:
    return "; deterministic: a sequence's bits do not depend on its batch" if config.deterministic else ""


def _compile_cache(backend: Backend) -> str:
    return "" if backend.compiler is None else f"; {backend.compiler.kept()[1]}"


def _lookup(config: EngineConfig) -> MakeDrafter | None:
    asked = config.speculative_config
    return None if asked is None else lambda slots, sampler: make_lookup(asked)


def _make_runner(
    config: EngineConfig,
    loaded: LoadedModel,
    sizing: KvSizing,
    kv: KvCache,
    backend: Backend,
    masks: SlotGrammars,
    resident: Callable[[], Resident] | None,
    drafter: MakeDrafter | None,
) -> AnyRunner:
    launches = DEVICES[config.device].make_launches()
    if launches is not None and backend.choice is not None:
        launches = EagerLaunches(launches) if config.enforce_eager else launches
        return DeviceRunner(
            loaded.model,
            kv,
            backend.choice,
            launches,
            max_num_seqs=config.max_num_seqs,
            most_tokens=step_tokens(config, sizing.max_model_len),
            max_model_len=sizing.max_model_len,
            device=config.device,
            masks=masks,
            eos_token_ids=loaded.eos_token_ids,
            places=NO_PLACES if resident is None else DevicePlaces(resident, config.max_lora_rank),
        )
    runner = ModelRunner(
        loaded.model,
        kv,
        max_num_seqs=config.max_num_seqs,
        max_model_len=sizing.max_model_len,
        eos_token_ids=loaded.eos_token_ids,
        device=config.device,
        draw=backend.draw,
        mask=backend.mask,
        masks=masks,
        resident=resident,
        drafter=drafter,
    )
    return OverlappedRunner(runner) if config.depth > 1 else runner


def _warm_up(runner: AnyRunner, config: EngineConfig, sizing: KvSizing, loaded: LoadedModel) -> float:
    """Returns the seconds that it took."""
    began = time.perf_counter()
    most_tokens = 0
    if isinstance(runner, DeviceRunner):
        runner.capture()
        log.info(
            "%s of the device's memory are free once steps are prepared", describe_bytes(DEVICES[config.device].free_memory().num_bytes)
        )
        most_tokens = step_tokens(config, sizing.max_model_len)
    has_adapters = loaded.model.adapters is not None
    warm_up(
        runner, config, max_model_len=sizing.max_model_len, vocab_size=loaded.vocab_size, most_tokens=most_tokens, has_adapters=has_adapters
    )
    return time.perf_counter() - began


def _model_info(
    config: EngineConfig,
    loaded: LoadedModel,
    groups: tuple[KvGroup, ...],
    sizing: KvSizing,
    kv_dtype: str,
    decided: tuple[str, ...],
    numerics: dict[str, str],
    peaks: Peaks,
) -> ModelInfo:
    token_flops, pair_flops = loaded.model.spec.flops(loaded.vocab_size)
    folder = Path(config.model)
    texts = {name: (folder / name).read_bytes() for names in TEXT_FILES.values() for name in names if (folder / name).is_file()}
    return ModelInfo(
        architecture=loaded.architecture,
        vocab_size=loaded.vocab_size,
        max_model_len=sizing.max_model_len,
        eos_token_ids=loaded.eos_token_ids,
        kv_groups=groups,
        block_size=config.block_size,
        num_blocks=sizing.num_blocks,
        dtype=_name(loaded.dtype),
        weight_bytes=loaded.weight_bytes,
        costly_context=loaded.model.spec.costly_context(),
        token_flops=token_flops,
        pair_flops=pair_flops,
        peak_read_bytes_per_s=peaks.read_bytes_per_s,
        peak_flops_per_s=peaks.flops_per_s,
        sampling_defaults=loaded.sampling_defaults,
        digests={"model": loaded.model_digest, "kv_dtype": kv_dtype, **text_digests(texts)},
        decided=decided,
        numerics=numerics,
    )
