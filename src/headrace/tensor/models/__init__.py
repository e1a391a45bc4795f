"""Decoder models by architecture name, loaded from a checkpoint folder.

`load_model` reads weights, `describe` reads only config.json. A new architecture is one file with a `decoder_spec` and one line in
ARCHITECTURES; see docs/models.md.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from hashlib import blake2b
from pathlib import Path
from threading import Thread
from typing import Any

import torch

from headrace.core.errors import CheckpointError, ConfigError, shorten
from headrace.core.kvgroup import KvGroup
from headrace.tensor.checkpoint.config import ConfigFile, read_config, read_generation_defaults
from headrace.tensor.checkpoint.folder import Checkpoint
from headrace.tensor.checkpoint.random_weights import RandomWeights, WeightShapes
from headrace.tensor.checkpoint.weights_digest import WeightsDigest
from headrace.tensor.kernels import Backend, load_backend
from headrace.tensor.kernels.rounding import Precision
from headrace.tensor.layers.weights import WeightReader
from headrace.tensor.models import gemma3, llama, mistral, mixtral, phi3, qwen2, qwen3, qwen3_moe
from headrace.tensor.models.decoder import DecoderModel
from headrace.tensor.models.fields import refuse_set
from headrace.tensor.models.spec import DecoderSpec
from headrace.tensor.packed.file import PackedFolder
from headrace.tensor.packed.store import PackedStore, store_name

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
LOAD_FORMATS = ("auto", "safetensors", "dummy")
_DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}
_STORED_DTYPES = {"F32": torch.float32, "BF16": torch.bfloat16, "F16": torch.float16}


@dataclass(frozen=True, slots=True, kw_only=True)
class LoadedModel:
    """A model with its weights in memory.

    max_model_len      longest context its tables were made for
    eos_token_ids      end tokens; empty when the checkpoint names none
    sampling_defaults  SamplingParams fields the checkpoint's author chose
    model_digest       hex; see `Checkpoint.digest`. Of random weights: of config.json and the seed
    weights            digest of all weight bytes, known now or later; None: of random weights, which `model_digest` says all of
    weight_bytes       read by one decode step of one sequence
    resident_bytes     held in memory
    keeping            writes the packed weights to disk; None: there is nothing to write
    """

    model: DecoderModel
    architecture: str
    vocab_size: int
    max_model_len: int
    eos_token_ids: tuple[int, ...]
    sampling_defaults: dict[str, Any]
    model_digest: str
    weights: WeightsDigest | None
    weight_bytes: int
    resident_bytes: int
    dtype: torch.dtype
    keeping: Thread | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelDescription:
    """What config.json alone says of a model, in the dtype it would compute with.

    dtype_name      of the checkpoint, as config.json says it; float32 when it does not
    weight_bytes    read by one decode step of one sequence
    resident_bytes  all weights, before any packing overhead
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


def load_model(
    folder: Path,
    *,
    backend: Backend,
    dtype: torch.dtype | None,
    device: str,
    load_format: str,
    seed: int,
    max_model_len: int | None,
    quantization: str = "none",
    packed: PackedFolder | None = None,
    rank: int = 0,
    world: int = 1,
) -> LoadedModel:
    """Read the folder's model for one rank.

    dtype          to compute with; None: the checkpoint's
    load_format    "dummy": random weights from config.json and `seed`; otherwise safetensors
    max_model_len  None: the checkpoint's
    quantization   "none", or how linears' weights are rounded at load (`kernels.rounding.Precision`)
    packed         where packed weights are kept for the next start; None: they are not

    Raises: CheckpointError naming file and reason; ConfigError for an option that this model cannot be run with.
    Memory: stays below the weights held + the largest fused tensor, twice, + small change.
    """
    if load_format not in LOAD_FORMATS:
        raise ConfigError("load_format", f"{load_format!r} is not one of {', '.join(LOAD_FORMATS)}")
    if world != 1:
        raise ConfigError("tensor_parallel_size", f"{world}: one model on several ranks is not supported yet", "Use 1.")
    precision, keeping, weights = Precision(quantization), None, None
    config = read_config(folder)
    architecture, spec = _read_spec(config)
    spec = spec.within(_resolve_max_model_len(max_model_len, spec.max_positions))
    defaults = read_generation_defaults(folder, config, spec.vocab_size)
    if load_format == "dummy":
        dtype = dtype or _named_dtype(config) or torch.float32
        source = RandomWeights(seed, dtype, 1.0 - spec.norm_plus)
        model = DecoderModel(WeightReader(source, backend, dtype, device, rank, world, precision), spec)
        digest = blake2b(Path(config.file).read_bytes() + f"{seed}".encode(), digest_size=16).hexdigest()
    else:
        checkpoint = Checkpoint(folder)
        dtype = dtype or _named_dtype(config) or _STORED_DTYPES.get(checkpoint.stored_dtype(f"{spec.names.embedding}.weight"))
        weights = WeightsDigest([Path(config.file), *checkpoint.files], None if packed is None else packed.directory)
        digest = checkpoint.digest()
        store = None
        layout = backend.packing.packed_layout(precision)
        if packed is not None and layout:
            kind = f"{quantization} {dtype} {rank}/{world}"
            store = PackedStore(
                packed, store_name(digest, checkpoint.files, precision=kind, layout=layout), backend.packing, weights.content
            )
        model = DecoderModel(WeightReader(checkpoint, backend, dtype or torch.float32, device, rank, world, precision, store), spec)
        checkpoint.check_all_read()
        if store is not None:
            if (made_from := store.made_from) is not None:
                weights.packed_from(made_from)
            keeping = store.save()
    if precision is not Precision.NONE:
        digest = blake2b(f"{digest} {quantization}".encode(), digest_size=16).hexdigest()
    return LoadedModel(
        model=model,
        architecture=architecture,
        vocab_size=spec.vocab_size,
        max_model_len=spec.max_positions,
        eos_token_ids=defaults.eos_token_ids,
        sampling_defaults=defaults.sampling,
        model_digest=digest,
        weights=weights,
        weight_bytes=model.weight_bytes,
        resident_bytes=model.resident_bytes,
        dtype=model.dtype,
        keeping=keeping,
    )


def describe(
    folder: Path, *, dtype: torch.dtype | None = None, max_model_len: int | None = None, quantization: str = "none"
) -> ModelDescription:
    """Sizes from config.json alone: no weight is opened, no memory used. Raises as `load_model` does."""
    config = read_config(folder)
    architecture, spec = _read_spec(config)
    spec = spec.within(_resolve_max_model_len(max_model_len, spec.max_positions))
    dtype = dtype or _named_dtype(config) or torch.float32
    shapes = WeightShapes(dtype)
    # No positions: rotary tables count for nothing here, and arithmetic on the meta device imports half of torch (seconds).
    reader = WeightReader(shapes, load_backend("reference"), dtype, "meta", precision=Precision(quantization))
    model = DecoderModel(reader, replace(spec, max_positions=0))
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
    )


def _read_spec(config: ConfigFile) -> tuple[str, DecoderSpec]:
    """The architecture's name and spec, once the features no architecture has are refused."""
    if config.has("auto_map"):
        config.refuse("auto_map", "asks for code from the checkpoint, which is never run", "Use a checkpoint without auto_map.")
    for name in ("quantization_config", "compression_config"):
        if config.has(name):
            config.refuse(name, "quantized checkpoints are not supported", "Use float32, bfloat16 or float16 weights.")
    refuse_set(config, "is_encoder_decoder", "add_cross_attention")
    names = config.items("architectures")
    if not names:
        config.refuse("architectures", "names no architecture")
    wanted = names[0]
    if not isinstance(wanted, str) or wanted not in ARCHITECTURES:
        raise CheckpointError(config.file, f"architecture {shorten(wanted)} is not supported", f"Supported: {', '.join(ARCHITECTURES)}.")
    return wanted, ARCHITECTURES[wanted](config)


def _resolve_max_model_len(wanted: int | None, trained: int) -> int:
    if wanted is None:
        return trained
    if not 1 <= wanted <= trained:
        raise ConfigError("max_model_len", f"{wanted} is outside 1..{trained}", f"The checkpoint was made for {trained} positions.")
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
