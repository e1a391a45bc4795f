"""Decoder models by architecture name, loaded from a checkpoint folder.

`load_model` reads weights, `describe` reads only config.json.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Callable
from dataclasses import dataclass, replace
from hashlib import blake2b
from pathlib import Path
from typing import Any

import torch

from headrace.core.errors import CheckpointError, ConfigError, shorten
from headrace.core.model_info import LOAD_FORMATS, KvGroup
from headrace.core.parallelism import ALONE, Place
from headrace.tensor.backends import load_backend
from headrace.tensor.checkpoint.config import ConfigFile, read_config, read_sampling_defaults
from headrace.tensor.checkpoint.end_tokens import read_end_tokens
from headrace.tensor.checkpoint.folder import Checkpoint
from headrace.tensor.checkpoint.formats.format import WeightFormat
from headrace.tensor.checkpoint.formats.table import READER_VERSION, QuantizedSource, read_format, resolve_precision
from headrace.tensor.checkpoint.gguf.checkpoint import GgufCheckpoint, GgufFormat
from headrace.tensor.checkpoint.random_weights import RandomWeights, WeightShapes
from headrace.tensor.checkpoint.weights_digest import WeightsDigest
from headrace.tensor.device import META, TensorDevice
from headrace.tensor.kernels import Backend
from headrace.tensor.kernels.rounding import Precision
from headrace.tensor.layers.adapted import ModelAdapters
from headrace.tensor.layers.weights import ExpectedWeights, StoredSource, WeightReader, WeightSource
from headrace.tensor.models import gemma3, llama, mistral, mixtral, phi3, qwen2, qwen3, qwen3_moe
from headrace.tensor.models.decoder import DecoderModel
from headrace.tensor.models.division import check_division
from headrace.tensor.models.fields import refuse_other_models, refuse_set
from headrace.tensor.models.spec import DecoderSpec
from headrace.tensor.packed.file import PackedFolder
from headrace.tensor.packed.store import PackedStore, store_name
from headrace.tensor.peers import NO_PEERS, Peers

log = logging.getLogger(__name__)

ARCHITECTURES: dict[str, Callable[[ConfigFile], DecoderSpec]] = {
    "LlamaForCausalLM": llama.decoder_spec,
    "MistralForCausalLM": mistral.decoder_spec,
    "Qwen2ForCausalLM": qwen2.decoder_spec,
    "Qwen3ForCausalLM": qwen3.decoder_spec,
    "Qwen3MoeForCausalLM": qwen3_moe.decoder_spec,
    "MixtralForCausalLM": mixtral.decoder_spec,
    "Gemma3ForCausalLM": gemma3.decoder_spec,
    "Phi3ForCausalLM": phi3.decoder_spec,
}
MODEL_TYPES = {
    "llama": "LlamaForCausalLM",
    "mistral": "MistralForCausalLM",
    "qwen2": "Qwen2ForCausalLM",
    "qwen3": "Qwen3ForCausalLM",
    "qwen3_moe": "Qwen3MoeForCausalLM",
    "mixtral": "MixtralForCausalLM",
    "gemma3_text": "Gemma3ForCausalLM",
    "phi3": "Phi3ForCausalLM",
}
"""For a config.json that names no architecture."""
_DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}
_STORED_DTYPES = {"F32": torch.float32, "BF16": torch.bfloat16, "F16": torch.float16}


@dataclass(frozen=True, slots=True, kw_only=True)
class LoadedModel:
    """
    max_model_len      longest context its tables were made for
    model_digest       hex; see `_Weights.served_digest`
    checkpoint_digest  hex; of the folder alone, equal on all ranks
    weights            digest of all weight bytes, known now or later; None for random weights, which `model_digest` identifies
    stored_as          the format of a quantized checkpoint, for people; "" for plain weights
    held               in how many bits the linears are held, for people
    store              its `save` keeps the packed linears on disk for the next start; None: they are not kept
    """

    model: DecoderModel
    architecture: str
    vocab_size: int
    max_model_len: int
    eos_token_ids: tuple[int, ...]
    sampling_defaults: dict[str, Any]
    model_digest: str
    checkpoint_digest: str
    weights: WeightsDigest | None
    precision: Precision
    stored_as: str
    held: str
    store: PackedStore | None = None

    @property
    def weight_bytes(self) -> int:
        return self.model.weight_bytes

    @property
    def resident_bytes(self) -> int:
        return self.model.resident_bytes

    @property
    def dtype(self) -> torch.dtype:
        return self.model.dtype


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelDescription:
    """
    dtype_name      the checkpoint's dtype by config.json; float32 if it names none
    weight_bytes    read by one decode step of one sequence, in the dtype that the model would compute with
    resident_bytes  of all weights, without overhead of packing
    held            in how many bits most linears are held, rounded at load or as stored
    """

    architecture: str
    vocab_size: int
    max_model_len: int
    kv_groups: tuple[KvGroup, ...]
    num_layers: int
    num_parameters: int
    dtype_name: str
    weight_bytes: int
    resident_bytes: int
    precision: Precision
    held: Precision


def load_model(
    folder: Path,
    *,
    backend: Backend,
    dtype: torch.dtype | None,
    device: TensorDevice,
    load_format: str,
    seed: int,
    max_model_len: int | None,
    quantization: str = "none",
    packed: PackedFolder | None = None,
    enable_lora: bool = False,
    place: Place = ALONE,
    peers: Peers = NO_PEERS,
) -> LoadedModel:
    """dtype          to compute with; None: the checkpoint's
    load_format    "dummy": random weights from config.json and `seed`; otherwise safetensors
    max_model_len  None: the checkpoint's (`DecoderSpec.default_positions`)
    quantization   "none", how linears' weights are rounded at load (`kernels.rounding.Precision`), or the checkpoint's own format
    packed         None: packed linears are not kept for the next start
    enable_lora    tokens may have adapters (`DecoderModel.adapters`)

    Raises CheckpointError naming file and reason; ConfigError for an option that this model cannot be run with.
    Memory: at most the weights held, twice the largest fused tensor, and small change.
    """
    assert place == ALONE or peers is not NO_PEERS, "several ranks need peers"
    _check_load_format(load_format)
    config = read_config(folder)
    architecture, spec = read_spec(config)
    check_division(spec, place.parallelism)
    stored = read_format(config)
    precision = resolve_precision(quantization, stored)
    _log_ignored(config, architecture)
    spec = spec.within(_resolve_max_model_len(max_model_len, spec))
    sampling = read_sampling_defaults(folder, config, spec.vocab_size)
    end_tokens = read_end_tokens(folder, config, spec.vocab_size)
    dtype = dtype or _named_dtype(config)
    if load_format == "dummy":
        weights = _random_weights(config, spec, dtype or torch.float32, seed, device.name)
    else:
        weights = _open_checkpoint(_weight_files(folder, stored), spec, dtype, packed)
        weights.open_store(packed, backend, precision, place, stored)
    reader = weights.reader(stored, backend, device, precision, place, peers, _adapters(backend) if enable_lora else None)
    return LoadedModel(
        model=weights.build(reader, spec),
        architecture=architecture,
        vocab_size=spec.vocab_size,
        max_model_len=spec.max_positions,
        eos_token_ids=end_tokens,
        sampling_defaults=sampling,
        model_digest=weights.served_digest(precision, spec, reader),
        checkpoint_digest=weights.digest,
        weights=weights.content,
        precision=precision,
        stored_as="" if stored is None else stored.title,
        held=_held(reader),
        store=weights.store,
    )


def _adapters(backend: Backend) -> ModelAdapters:
    if backend.adapters is None:
        raise ConfigError("enable_lora", f"{backend.name} kernels compute no adapters", "Merge the adapter into the base weights.")
    return ModelAdapters(backend.adapters)


def _check_load_format(load_format: str) -> None:
    if load_format not in LOAD_FORMATS:
        raise ConfigError("load_format", f"{load_format!r} is not one of {', '.join(LOAD_FORMATS)}")


@dataclass(slots=True)
class _Weights:
    """
    dtype    to compute with
    digest   hex; of the checkpoint's headers and samples, or of config.json and the seed
    content  digest of all weight bytes; None for random weights
    store    packed linears of earlier starts; None: none are kept
    """

    source: Checkpoint | GgufCheckpoint | RandomWeights
    dtype: torch.dtype
    digest: str
    content: WeightsDigest | None = None
    store: PackedStore | None = None

    def reader(
        self,
        stored: WeightFormat | GgufFormat | None,
        backend: Backend,
        device: TensorDevice,
        precision: Precision,
        place: Place,
        peers: Peers,
        adapters: ModelAdapters | None,
    ) -> WeightReader:
        """Keeps the few bits of `stored` where the backend multiplies them so, and linears are not to be rounded further."""
        source: WeightSource = self.source
        few_bits: StoredSource | None = self.source if isinstance(self.source, GgufCheckpoint) else None
        if isinstance(self.source, Checkpoint) and stored is not None and not isinstance(stored, GgufFormat):
            source = few_bits = QuantizedSource(self.source, stored)
        if precision is not Precision.NONE or not backend.packing.keeps_stored:
            few_bits = None
        return WeightReader(source, backend, self.dtype, device, place, peers, precision, self.store, few_bits, adapters)

    def open_store(
        self, packed: PackedFolder | None, backend: Backend, precision: Precision, place: Place, stored: WeightFormat | GgufFormat | None
    ) -> None:
        form = backend.packed_format
        if packed is not None and form is not None and not isinstance(self.source, RandomWeights) and self.content is not None:
            version = "" if stored is None else f", read by {READER_VERSION}"
            kind = f"{precision.value} {self.dtype} {place.parallelism}{version}"
            name = store_name(self.digest, self.source.files, precision=kind, layout=form.packed_layout(precision), rank=place.rank)
            self.store = PackedStore(packed, name, form, self.content.content)

    def build(self, reader: WeightReader, spec: DecoderSpec) -> DecoderModel:
        """Raises CheckpointError also if the checkpoint lacks a tensor of another rank, or holds one that the model does not ask for."""
        spec = _with_stored_table(spec, self.source)
        if reader.place.parallelism.pp > 1 or reader.place.parallelism.ep:
            expected = ExpectedWeights(reader.source, self.dtype)
            whole = None if reader.adapters is None else ModelAdapters(reader.adapters.kernels)
            _without_values(spec, WeightReader(expected, load_backend("reference"), self.dtype, META, adapters=whole))
            if reader.adapters is not None and whole is not None:
                reader.adapters.shapes.update(whole.shapes)
        model = DecoderModel(reader, spec)
        if not isinstance(self.source, RandomWeights):
            self.source.check_all_read()
        if self.store is not None and self.content is not None and (made_from := self.store.made_from) is not None:
            self.content.packed_from(made_from)
        return model

    def served_digest(self, precision: Precision, spec: DecoderSpec, reader: WeightReader) -> str:
        """`digest`, and what else decides the keys and values: how the linears were rounded or are held, and LongRoPE's long factors."""
        choices = [] if precision is Precision.NONE else [precision.value]
        if reader.stored is not None:
            choices.append(_held(reader))
        if spec.longrope is not None and spec.longrope.is_long(spec.max_positions):
            choices.append("long factors")
        return blake2b(" ".join([self.digest, *choices]).encode(), digest_size=16).hexdigest() if choices else self.digest


def _log_ignored(config: ConfigFile, architecture: str) -> None:
    if config.has("auto_map"):
        log.info("%s: auto_map is ignored: %s is served by our own code, and code in the folder is never run", config.file, architecture)


def _held(reader: WeightReader) -> str:
    names = {4: "in 4 bits", 8: "in 8 bits", 16: "dense"}
    return "linears " + ", ".join(f"{names[bits]}: {reader.held[bits]}" for bits in sorted(reader.held))


def _random_weights(config: ConfigFile, spec: DecoderSpec, dtype: torch.dtype, seed: int, device: str) -> _Weights:
    digest = blake2b(Path(config.file).read_bytes() + f"{seed}".encode(), digest_size=16).hexdigest()
    return _Weights(RandomWeights(seed, dtype, 1.0 - spec.norm_plus, device), dtype, digest)


def _weight_files(folder: Path, stored: WeightFormat | GgufFormat | None) -> Checkpoint | GgufCheckpoint:
    return GgufCheckpoint(folder) if isinstance(stored, GgufFormat) else Checkpoint(folder)


def _with_stored_table(spec: DecoderSpec, files: WeightSource) -> DecoderSpec:
    """With the head's name for the embedding where a tied model's one table is stored under that alone: of tensors that share memory,
    safetensors keeps the name that is first in the alphabet."""
    names = spec.names
    if spec.is_tied and files.has(f"{names.head}.weight") and not files.has(f"{names.embedding}.weight"):
        return replace(spec, names=replace(names, embedding=names.head))
    return spec


def _open_checkpoint(
    checkpoint: Checkpoint | GgufCheckpoint, spec: DecoderSpec, dtype: torch.dtype | None, packed: PackedFolder | None
) -> _Weights:
    """dtype: None: that of the stored embedding; float32 where it stores integers."""
    names = _with_stored_table(spec, checkpoint).names
    dtype = dtype or _STORED_DTYPES.get(checkpoint.stored_dtype(f"{names.embedding}.weight")) or torch.float32
    content = WeightsDigest([*checkpoint.config_files, *checkpoint.files], None if packed is None else packed.directory)
    return _Weights(checkpoint, dtype, checkpoint.digest(), content)


def describe(
    folder: Path,
    *,
    dtype: torch.dtype | None = None,
    max_model_len: int | None = None,
    quantization: str = "none",
    has_fp8: bool = False,
    place: Place = ALONE,
) -> ModelDescription:
    """What one rank holds. No weight is read, and no memory is allocated for weights. has_fp8: linears that are stored in FP8 stay so.

    Raises CheckpointError for a missing or invalid config.json, and ConfigError for an option that this model cannot be run with.
    """
    config = read_config(folder)
    architecture, spec = read_spec(config)
    check_division(spec, place.parallelism)
    spec = spec.within(_resolve_max_model_len(max_model_len, spec))
    stored = read_format(config)
    dtype, precision = dtype or _named_dtype(config) or torch.float32, resolve_precision(quantization, stored)
    held = precision
    if precision is Precision.NONE and stored is not None and (stored.precision is not Precision.FP8 or has_fp8):
        held = stored.precision
    is_gguf = isinstance(stored, GgufFormat) and held is not Precision.NONE
    shapes = WeightShapes(dtype, held, Precision.INT8 if is_gguf else Precision.NONE)  # other formats leave most heads plain
    model = _without_values(spec, _shapes_reader(shapes, dtype, precision, place))
    return ModelDescription(
        architecture=architecture,
        vocab_size=spec.vocab_size,
        max_model_len=spec.max_positions,
        kv_groups=model.kv_groups,
        num_layers=len(spec.layers),
        num_parameters=shapes.num_parameters,
        dtype_name=str(dtype).removeprefix("torch."),
        weight_bytes=model.weight_bytes,
        resident_bytes=model.resident_bytes,
        precision=precision,
        held=held,
    )


def weight_shapes(spec: DecoderSpec) -> dict[str, tuple[int, ...]]:
    """By name, from a checkpoint that stores every expert apart."""
    shapes = WeightShapes(torch.float32)
    _without_values(spec, _shapes_reader(shapes, torch.float32, Precision.NONE, ALONE))
    return shapes.shapes


def _shapes_reader(shapes: WeightShapes, dtype: torch.dtype, precision: Precision, place: Place) -> WeightReader:
    few_bits = shapes if precision is Precision.NONE else None
    return WeightReader(shapes, load_backend("reference"), dtype, META, place, precision=precision, stored=few_bits)


def _without_values(spec: DecoderSpec, reader: WeightReader) -> DecoderModel:
    """No positions: rotary tables count for nothing here, and arithmetic on the meta device imports half of torch (seconds)."""
    return DecoderModel(reader, replace(spec, max_positions=0))


def read_spec(config: ConfigFile) -> tuple[str, DecoderSpec]:
    """Raises CheckpointError for features that no architecture here has."""
    refuse_set(config, "is_encoder_decoder", "add_cross_attention")
    refuse_other_models(config)
    architecture = find_architecture(config)
    _check_model_type(config, architecture)
    spec = ARCHITECTURES[architecture](config)
    if not math.isclose(config.number("attention_multiplier", 0.0, 1e9, scale := spec.layers[0].attention.scale), scale, rel_tol=1e-3):
        config.refuse("attention_multiplier", f"{architecture} multiplies scores by {scale:g}")
    return architecture, spec


def _check_model_type(config: ConfigFile, architecture: str) -> None:
    """Refuse a `model_type` of another architecture: transformers goes by it, vLLM by `architectures`, and one of the two is wrong.

    An unknown type is that of a folder's own code, whose architecture counts.
    """
    if MODEL_TYPES.get(config.text("model_type", ""), architecture) != architecture:
        config.refuse("model_type", f"contradicts architectures, which names {architecture}", "Correct the wrong one.")


def find_architecture(config: ConfigFile) -> str:
    """Raises CheckpointError."""
    names, model_type = config.items("architectures"), config.text("model_type", "")
    if not names and model_type in MODEL_TYPES:
        return MODEL_TYPES[model_type]
    if not names:
        reason = f"names no architecture, nor does model_type ({shorten(model_type)})"
        config.refuse("architectures", reason, f"Supported: {', '.join(ARCHITECTURES)}.")
    for name in names:
        if isinstance(name, str) and name in ARCHITECTURES:
            return name
    reason = f"architecture {shorten(names[0])} is not supported"
    if config.has("auto_map"):
        reason += ", and the code that auto_map names for it is never run"
    raise CheckpointError(config.file, reason, f"Supported: {', '.join(ARCHITECTURES)}.")


def _resolve_max_model_len(wanted: int | None, spec: DecoderSpec) -> int:
    if wanted is None:
        return spec.default_positions
    trained = spec.max_positions
    if not 1 <= wanted <= trained:
        remedy = f"The checkpoint was made for {trained} positions; more need rope_scaling in its config.json, as its model card says."
        raise ConfigError("max_model_len", f"{wanted} is outside 1..{trained}", remedy)
    return wanted


def _named_dtype(config: ConfigFile) -> torch.dtype | None:
    """`dtype`, formerly `torch_dtype`; None when absent or "auto"."""
    field = "dtype" if config.has("dtype") else "torch_dtype"
    name = config.text(field, "auto").removeprefix("torch.")
    if name == "auto":
        return None
    if name not in _DTYPES:
        config.refuse(field, f"only {', '.join(_DTYPES)} are supported")
    return _DTYPES[name]
