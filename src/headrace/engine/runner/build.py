"""Builds a runner from an engine's configuration, and logs every choice in words."""

from __future__ import annotations

import logging
import re
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, closing, contextmanager, nullcontext
from dataclasses import replace
from importlib import import_module
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import NamedTuple

import torch

from headrace import __version__
from headrace.core.errors import ConfigError, counted
from headrace.core.load import GpuUse
from headrace.core.model_info import TEXT_FILES, WEIGHTS, ModelInfo, text_digests
from headrace.core.parallelism import Parallelism
from headrace.engine.adapters.preparer import AdapterPreparer
from headrace.engine.config import EngineConfig
from headrace.engine.grammar.preparer import GrammarCompiler, GrammarPreparer
from headrace.engine.grammar.slots import SlotGrammars
from headrace.engine.grammar.store import GrammarStore
from headrace.engine.kv_sizing import KvSizing, describe_bytes, out_of_memory, step_tokens
from headrace.engine.ranks.adapters import DividingLoader
from headrace.engine.ranks.frames import RankSizes
from headrace.engine.ranks.leader import LeadingKv, LeadingModel, LeadingRunner, RankGroup
from headrace.engine.ranks.meter import RankMeter
from headrace.engine.ranks.pipeline import EarlierStages, PipelinedRunner
from headrace.engine.runner.batch import Resident
from headrace.engine.runner.device.adapters import NO_PLACES, DevicePlaces
from headrace.engine.runner.device.runner import DeviceRunner
from headrace.engine.runner.drafts import MakeDrafter
from headrace.engine.runner.drafts.load import LoadedDraft, load_draft
from headrace.engine.runner.drafts.lookup import make_lookup
from headrace.engine.runner.loading import LoadedPart, StartChoices, choose, load_part, name_of
from headrace.engine.runner.masks import load_mask_kernel
from headrace.engine.runner.memory import RunnerMemory
from headrace.engine.runner.model_runner import ModelRunner, OverlappedRunner
from headrace.engine.runner.slots import SlotState
from headrace.engine.runner.warmup import log_compiling, warm_up
from headrace.tensor.adapters.loader import AdapterLoader
from headrace.tensor.batch import KvCache, PackedAdapter
from headrace.tensor.device import DEVICES
from headrace.tensor.host.cpu_features import CpuFeatures
from headrace.tensor.kernels import Backend
from headrace.tensor.kernels.rounding import Precision
from headrace.tensor.launches import EagerLaunches
from headrace.tensor.layers.rope import LinearScaling
from headrace.tensor.models import LoadedModel
from headrace.tensor.models.spec import DecoderSpec
from headrace.tensor.packed.file import PackedFolder
from headrace.tensor.packed.store import Pieces
from headrace.tensor.peaks import Peaks, measure_peaks
from headrace.tensor.peers import NO_PEERS

log = logging.getLogger(__name__)


AnyRunner = ModelRunner | OverlappedRunner | DeviceRunner | LeadingRunner

Lead = Callable[[Mapping[str, str]], RankGroup]
"""Gathers the other ranks. It is given what has to be equal on all of them, by name."""


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
    read_experts: Callable[[], Mapping[int, Sequence[int]]]
    group: RankGroup | None
    ranks: RankMeter | None
    memory: RunnerMemory


def build_runner(
    config: EngineConfig, packed: PackedFolder | None = None, features: CpuFeatures | None = None
) -> tuple[AnyRunner, ModelInfo]:
    return build(config.checked(), packed, features)[:2]


def build(
    config: EngineConfig,
    packed: PackedFolder | None = None,
    features: CpuFeatures | None = None,
    lead: Lead | None = None,
    parallelism: Parallelism | None = None,
    *,
    compiles_beside: bool = False,
) -> Built:
    """lead             None where the replica can have no rank but this one
    parallelism      None: as the options say
    compiles_beside  another process may compile kernels meanwhile

    Raises: ConfigError, CheckpointError; before any weight is read where that is possible. What ended another rank, too.
    """
    if config.parallelism.world > 1 and lead is None:
        raise ConfigError("tensor_parallel_size or pipeline_parallel_size", "this command starts one process of a replica", "Use 1.")
    place = (parallelism or config.parallelism).place(0)
    choices = choose(config, packed, features, place)
    with _compiling(choices, compiles_beside), ExitStack() as unless_ready:
        group = None if lead is None else unless_ready.enter_context(closing(lead(choices.facts(config))))
        part = load_part(config, choices, packed, place, NO_PEERS if group is None else group.peers)
        loaded = part.loaded
        peaks = measure_peaks(config.device, choices.dtype)
        draft = None if choices.drafting is None else load_draft(choices.drafting, config, choices.backend, choices.dtype, choices.kv_dtype)
        loader = part.adapter_loader(config)
        sizing = _size(config, part, loader, draft, group)
        adapters = None if loader is None else _read_adapters(config, loader if group is None else DividingLoader(loader, group))
        compiler = GrammarCompiler(Path(config.model), loaded.vocab_size, loaded.eos_token_ids)
        grammars = GrammarStore(compiler)
        with _memory_errors_named(sizing):
            kv = _allocate(config, part, sizing, group)
            resident = None if adapters is None else adapters.resident
            drafter = _lookup(config) if draft is None else draft.allocate(sizing.num_blocks, config)
            runner = _make_runner(config, loaded, sizing, kv, choices.backend, SlotGrammars(grammars), resident, drafter, group)
            unless_ready.callback(runner.close)
            load_mask_kernel(choices.backend.mask)
            seconds = _warm_up(runner, config, sizing, loaded)
        kv.clear_pad_block()
        unless_ready.pop_all()
    unwritten = None if loaded.store is None else loaded.store.save()  # only now: it holds the weights, which a failed start must release
    decided = (
        *_model_lines(config, loaded),
        *(() if draft is None else (draft.line,)),
        *choices.lines(config),
        *sizing.lines,
        *_adapter_lines(config, loader, adapters),
        *_speculation_lines(config),
        f"peaks, as measured: {peaks.read_bytes_per_s / 1e9:.1f} GB/s, {peaks.flops_per_s / 1e12:.2f} TFLOP/s",
        f"warm-up: {seconds:.1f} s",
    )
    numerics = _numerics(config, choices, loaded)
    weights = None if numerics[WEIGHTS] or loaded.weights is None else loaded.weights.compute
    info = _model_info(config, part, sizing, decided, numerics, peaks).with_adapters({} if adapters is None else adapters.digests)
    preparer, memory = GrammarPreparer(compiler, grammars), RunnerMemory(config, loaded, kv)
    ranks = None if group is None else RankMeter(group.peers, config.parallelism)
    read_experts, read_gpu = lambda: loaded.model.expert_tokens, DEVICES[config.device].read_gpu
    return Built(runner, info, weights, preparer, adapters, unwritten, read_gpu, read_experts, group, ranks, memory)


@contextmanager
def _compiling(choices: StartChoices, beside: bool) -> Iterator[None]:
    with log_compiling(choices.backend.compiler), choices.compiling_ahead() if beside else nullcontext():
        yield


def _size(
    config: EngineConfig, part: LoadedPart, loader: AdapterLoader | None, draft: LoadedDraft | None, group: RankGroup | None
) -> KvSizing:
    """In a group, the blocks that fit every rank."""
    budget, draft_groups = part.budget(config, loader, draft), () if draft is None else draft.kv_groups
    own = part.size(config, budget, draft_groups)
    if group is None:
        return own
    here = RankSizes(own.num_full_blocks, part.loaded.resident_bytes, part.loaded.checkpoint_digest, part.weights_digest)
    num_blocks, sizes = group.agree(here)
    agreed = part.size(config, budget, draft_groups, most=num_blocks)
    ranks = "; ".join(
        f"rank {rank}: {describe_bytes(its.weight_bytes)} of weights, {its.num_blocks:,} blocks fit" for rank, its in sizes.items()
    )
    return replace(agreed, lines=(f"ranks: {_describe_ranks(config.parallelism)}; {ranks}", *agreed.lines))


def _describe_ranks(parallelism: Parallelism) -> str:
    experts = ", each with whole experts" if parallelism.ep else ""
    return f"{counted(parallelism.pp, 'stage')} of {counted(parallelism.tp, 'rank')}{experts}"


def _allocate(config: EngineConfig, part: LoadedPart, sizing: KvSizing, group: RankGroup | None) -> KvCache:
    own = part.allocate(config, sizing)
    if group is None:
        return own
    group.wait_until_ready()
    return LeadingKv(own, group)


def _model_lines(config: EngineConfig, loaded: LoadedModel) -> list[str]:
    return [
        f"model: {loaded.architecture} from {config.model}, {describe_bytes(loaded.resident_bytes)} of weights{_rounded(loaded)}",
        *(f"LongRoPE: {choice}" for choice in _longrope(loaded).values()),
        *_linear_scaling(loaded.model.spec),
    ]


def _numerics(config: EngineConfig, choices: StartChoices, loaded: LoadedModel) -> dict[str, str]:
    parallelism = config.parallelism
    return {
        WEIGHTS: loaded.model_digest if loaded.weights is None else loaded.weights.known,
        "quantization": loaded.held if loaded.stored_as else loaded.precision.value,
        "dtype": name_of(loaded.dtype),
        "KV dtype": name_of(choices.kv_dtype),
        "kernels": choices.kernels,
        "device": DEVICES[config.device].identity,
        "CPU": f"{choices.features.machine} {choices.features.family}",
        # Headrace's own kernels give the same bits with any number of threads; a library's may not.
        "threads": "any" if config.deterministic else str(choices.threads.num_threads),
        "deterministic": str(config.deterministic),
        "versions": _versions(choices.backend),
        # A sum over ranks has another order than one rank's.
        **({} if parallelism.tp == 1 else {"ranks": f"{parallelism.tp}, {'whole experts' if parallelism.ep else 'parts of each layer'}"}),
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


def _read_adapters(config: EngineConfig, loader: AdapterLoader | DividingLoader) -> AdapterPreparer[PackedAdapter]:
    """Warm-up runs steps with an adapter of zeros. Raises CheckpointError for a listed adapter that cannot be loaded."""
    adapters = AdapterPreparer[PackedAdapter](
        loader, max_loras=config.max_loras, max_cpu_loras=config.num_cpu_loras, max_num_seqs=config.max_num_seqs
    )
    adapters.set(config.lora_modules)
    adapters.put_first(loader.zeros())
    return adapters


def _speculation_lines(config: EngineConfig) -> list[str]:
    if config.speculative_config is None:
        return []
    return [f"speculation: {config.speculative_config.method}, at most {config.speculative_config.num_speculative_tokens} drafted tokens"]


def _adapter_lines(config: EngineConfig, loader: AdapterLoader | None, adapters: AdapterPreparer[PackedAdapter] | None) -> list[str]:
    if loader is None or adapters is None:
        return []
    size = f"at most {describe_bytes(loader.max_bytes)} each (rank {config.max_lora_rank})"
    return [f"adapters: {len(adapters.digests)}, {config.max_loras} in use at once, {config.num_cpu_loras} in memory, {size}"]


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
    group: RankGroup | None,
) -> AnyRunner:
    launches = DEVICES[config.device].make_launches()
    if launches is not None and backend.choice is not None and group is None:
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
        loaded.model if group is None else LeadingModel(loaded.model, group),
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
    if group is not None and config.pipeline_parallel_size > 1:
        slots = SlotState(config.max_num_seqs, sizing.max_model_len, len(kv.pools), kv.block_size)
        return LeadingRunner(PipelinedRunner(runner, EarlierStages(group, slots, resident), group), group)
    overlapped = OverlappedRunner(runner) if config.depth > 1 else runner
    return overlapped if group is None else LeadingRunner(overlapped, group)


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
    config: EngineConfig, part: LoadedPart, sizing: KvSizing, decided: tuple[str, ...], numerics: dict[str, str], peaks: Peaks
) -> ModelInfo:
    loaded, folder, world = part.loaded, Path(config.model), config.parallelism.world
    token_flops, pair_flops = loaded.model.spec.flops(loaded.vocab_size)
    texts = {name: (folder / name).read_bytes() for names in TEXT_FILES.values() for name in names if (folder / name).is_file()}
    return ModelInfo(
        architecture=loaded.architecture,
        vocab_size=loaded.vocab_size,
        max_model_len=sizing.max_model_len,
        eos_token_ids=loaded.eos_token_ids,
        kv_groups=part.kv_groups,
        block_size=config.block_size,
        num_blocks=sizing.num_blocks,
        dtype=name_of(loaded.dtype),
        weight_bytes=loaded.weight_bytes,
        costly_context=loaded.model.spec.costly_context(),
        token_flops=token_flops // world,
        pair_flops=pair_flops // world,
        peak_read_bytes_per_s=peaks.read_bytes_per_s,
        peak_flops_per_s=peaks.flops_per_s,
        sampling_defaults=loaded.sampling_defaults,
        digests={"model": loaded.model_digest, "kv_dtype": name_of(part.kv_dtype), **text_digests(texts)},
        decided=decided,
        numerics=numerics,
    )
