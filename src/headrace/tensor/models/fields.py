"""Fields of config.json that several architectures share, each read and bounded once.

The bounds are far above any real model: they keep absurd values (negative sizes, 10^9 layers) away from memory.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass

from headrace.core.errors import shorten
from headrace.tensor.checkpoint.config import ConfigFile
from headrace.tensor.layers.attention import AttentionSpec
from headrace.tensor.layers.mlp import MlpSpec
from headrace.tensor.layers.rope import (
    LinearScaling,
    Llama3Scaling,
    LongRopeScaling,
    RopeSpec,
    Scaling,
    YarnScaling,
    longrope_magnitude,
    yarn_magnitude,
)
from headrace.tensor.models.spec import DecoderSpec, LayerSpec, TensorNames

MAX_LAYERS = 1024
MAX_WIDTH = 2**20
MAX_POSITIONS = 2**26
_ACTIVATIONS = {"silu": "silu", "swish": "silu", "gelu_pytorch_tanh": "gelu_tanh"}
_NEVER, _ONE = (0, False), (1,)
_OTHER_FAMILIES: dict[str, tuple[object, ...]] = {
    **dict.fromkeys(("embedding_multiplier", "residual_multiplier", "logits_scaling", "logit_scale", "lm_head_multiplier"), _ONE),
    **dict.fromkeys(("scale_emb", "scale_depth", "routed_scaling_factor", "router_scaling_factor"), _ONE),
    **dict.fromkeys(("n_group", "topk_group", "no_rope_layer_interval", "interleave_moe_layer_step"), (*_NEVER, 1)),
    **dict.fromkeys(("attn_logit_softcapping", "final_logit_softcapping", "clip_qkv", "alibi", "use_alibi", "parallel_attn"), _NEVER),
    **dict.fromkeys(("use_parallel_residual", "rope_interleave", "rope_interleaved", "attention_chunk_size", "dim_model_base"), _NEVER),
    **dict.fromkeys(("n_shared_experts", "num_shared_experts", "shared_expert_intermediate_size", "first_k_dense_replace"), _NEVER),
    **dict.fromkeys(("no_rope_layers", "attn_temperature_tuning", "use_bidirectional_attention", "kv_lora_rank"), (*_NEVER, [])),
    "scoring_func": ("softmax",),
}
"""Field -> values with which it changes nothing."""
_ROPE_FIELDS = {
    "default": set(),
    "linear": {"factor", "original_max_position_embeddings"},
    "llama3": {"factor", "low_freq_factor", "high_freq_factor", "original_max_position_embeddings"},
    "yarn": {"factor", "original_max_position_embeddings", "attention_factor", "attn_factor", "beta_fast", "beta_slow", "mscale",
             "mscale_all_dim", "truncate", "finetuned"},
    "longrope": {"factor", "original_max_position_embeddings", "attention_factor", "short_factor", "long_factor"},
}  # fmt: skip
""""finetuned" is its authors' note that the model was trained on with the scaling; nothing is computed from it."""
_ROPE_COMMON = {"rope_theta", "rope_type", "type", "partial_rotary_factor"}
_DYNAMIC_REMEDY = (
    'Its frequencies change while a sequence grows, and cached keys cannot change with them. Write "yarn" with factor and '
    "original_max_position_embeddings instead, or leave the scaling out and serve max_position_embeddings."
)
_TWO_ROPES_REMEDY = "Write the scaling's fields into rope_parameters, beside rope_theta, and leave rope_scaling out."


@dataclass(frozen=True, slots=True, kw_only=True)
class DecoderShape:
    """max_positions: `max_position_embeddings`; rotary scaling may serve more."""

    vocab_size: int
    hidden_size: int
    num_layers: int
    heads: int
    kv_heads: int
    head_dim: int
    max_positions: int
    norm_eps: float


def read_shape(config: ConfigFile, *, norm_eps: float = 1e-6, head_dim: int | None = None) -> DecoderShape:
    """Raises CheckpointError, which names the field, for a missing field and for a value out of its bounds.

    norm_eps  default for a file without the field
    head_dim  default for a file without the field; None, or a field that is null: hidden_size / num_attention_heads
    """
    hidden_size = config.integer("hidden_size", 1, MAX_WIDTH)
    heads = config.integer("num_attention_heads", 1, 4096)
    kv_heads = config.integer("num_key_value_heads", 1, heads, default=heads)
    if heads % kv_heads:
        config.refuse("num_key_value_heads", f"must divide num_attention_heads ({heads})")
    if head_dim is None or "head_dim" in config.values:
        head_dim = _read_head_dim(config, hidden_size, heads)
    return DecoderShape(
        vocab_size=config.integer("vocab_size", 1, 2**24),
        hidden_size=hidden_size,
        num_layers=config.integer("num_hidden_layers", 1, MAX_LAYERS),
        heads=heads,
        kv_heads=kv_heads,
        head_dim=head_dim,
        max_positions=config.integer("max_position_embeddings", 1, MAX_POSITIONS),
        norm_eps=config.number("rms_norm_eps", 0.0, 1.0, default=norm_eps),
    )


def _read_head_dim(config: ConfigFile, hidden_size: int, heads: int) -> int:
    if not config.has("head_dim") and hidden_size % heads:
        config.refuse("num_attention_heads", f"must divide hidden_size ({hidden_size}) when head_dim is not given")
    return config.integer("head_dim", 2, 1024, default=max(hidden_size // heads, 2))


def attention_spec(
    shape: DecoderShape, rope: RopeSpec, *, window: int | None = None, qkv_bias: bool = False, output_bias: bool = False
) -> AttentionSpec:
    """Scores are divided by sqrt(head_dim)."""
    return AttentionSpec(
        heads=shape.heads,
        kv_heads=shape.kv_heads,
        head_dim=shape.head_dim,
        scale=shape.head_dim**-0.5,
        rope=rope,
        window=window,
        qkv_bias=qkv_bias,
        output_bias=output_bias,
    )


def read_mlp(config: ConfigFile, *, bias: bool = False) -> MlpSpec:
    return MlpSpec(size=config.integer("intermediate_size", 1, MAX_WIDTH), activation=read_activation(config), bias=bias)


def read_activation(config: ConfigFile, name: str = "hidden_act", default: str = "silu") -> str:
    value = config.text(name, default)
    if value not in _ACTIVATIONS:
        config.refuse(name, f"only {', '.join(_ACTIVATIONS)} are supported")
    return _ACTIVATIONS[value]


def read_top_k(config: ConfigFile, num_experts: int, *, default: int) -> int:
    return config.integer("num_experts_per_tok", 1, num_experts, default=default)


def read_window(config: ConfigFile, *, default: int | None = None) -> int | None:
    """`sliding_window`: tokens that a query attends to, itself included. default: for a file without the field.

    Readers disagree about a window beside `use_sliding_window` false: transformers leaves the flag to Qwen, vLLM takes it everywhere.
    """
    if "sliding_window" not in config.values:
        window = default
    else:
        window = config.integer("sliding_window", 1, MAX_POSITIONS) if config.has("sliding_window") else None
    if window is not None and not config.flag("use_sliding_window", True):
        config.refuse("use_sliding_window", f"contradicts the window of {window}", 'Write "sliding_window": null for none.')
    return window


def read_layer_windows(config: ConfigFile, num_layers: int) -> list[int | None]:
    """By Qwen's fields: `use_sliding_window`, and `layer_types` or every layer from `max_window_layers` on."""
    window = read_window(config) if config.flag("use_sliding_window", False) else None
    if config.has("layer_types"):
        return windows_by_type(config, window, num_layers)
    first = config.integer("max_window_layers", 0, MAX_LAYERS, default=28)
    return [window if index >= first else None for index in range(num_layers)]


def windows_by_type(config: ConfigFile, window: int | None, num_layers: int) -> list[int | None]:
    types = config.items("layer_types")
    if len(types) != num_layers:
        config.refuse("layer_types", f"must name all {num_layers} layers")
    for kind in types:
        if kind not in ("full_attention", "sliding_attention"):
            config.refuse("layer_types", "only full_attention and sliding_attention are supported")
        if kind == "sliding_attention" and window is None:
            config.refuse("layer_types", "names sliding_attention, but no sliding_window is in force")
    return [window if kind == "sliding_attention" else None for kind in types]


def refuse_set(config: ConfigFile, *names: str) -> None:
    """Raises CheckpointError for a field that asks for a feature; an absent field, null, false and zero are accepted."""
    for name in names:
        if config.values.get(name):
            config.refuse(name, "is not supported")


def refuse_other_models(config: ConfigFile) -> None:
    """Raises CheckpointError for a field by which another family computes something else: under this architecture's name transformers may
    ignore the field, while other servers do not."""
    for name, neutral in _OTHER_FAMILIES.items():
        if config.has(name) and config.values[name] not in neutral:
            config.refuse(name, "is computed by no architecture here", "Remove the field if the model was trained without it.")


def rope_field(config: ConfigFile) -> str:
    return "rope_scaling" if config.values.get("rope_scaling") else "rope_parameters"


def read_rope(config: ConfigFile, shape: DecoderShape, *, theta: float = 10_000.0, layer_type: str | None = None,
              theta_field: str = "rope_theta", has_partial: bool = False) -> RopeSpec:  # fmt: skip
    """Rotary parameters: `rope_parameters` (flat, or below the layer type), the older `rope_theta` beside `rope_scaling`, or both.

    theta        where the file names none
    theta_field  the older field that holds theta for this layer type
    has_partial  the architecture may rotate a part of the head only
    """
    params = _rope_params(config, layer_type)
    base = params if params.has("rope_theta") else ConfigFile(config.file, {"rope_theta": config.values.get(theta_field)})
    kind = params.text("rope_type", params.text("type", "default"))
    if kind not in _ROPE_FIELDS:
        field = "rope_type" if params.has("rope_type") else "type"
        params.refuse(field, f"rope scaling is one of {', '.join(_ROPE_FIELDS)}", _DYNAMIC_REMEDY if kind == "dynamic" else "")
    for name in params.values:
        if name not in _ROPE_FIELDS[kind] | _ROPE_COMMON and params.has(name):
            params.refuse(name, f"is not a field of rope scaling {kind!r}")
    rotary_dim = _rotary_dim(config, params, shape.head_dim, has_partial)
    return RopeSpec(
        theta=base.number("rope_theta", 1.0, 1e12, default=theta),
        rotary_dim=rotary_dim,
        scaling=_read_scaling(config, params, kind, shape.max_positions, rotary_dim // 2),
    )


def _rope_params(config: ConfigFile, layer_type: str | None) -> ConfigFile:
    """In one object or in two that agree: transformers saves theta in `rope_parameters`, model cards say to add `rope_scaling`."""
    params, scaling = config.section("rope_parameters"), config.section("rope_scaling")
    if layer_type is not None:
        params = params.section(layer_type)
    if not params.values or not scaling.values:
        return scaling if scaling.values else params
    saved, added = _with_one_type(params), _with_one_type(scaling)
    if saved.get("rope_type") == "default":
        del saved["rope_type"]
    for name, value in saved.items():
        if added.get(name, value) != value:
            config.refuse("rope_scaling", f"{name} is {shorten(value)} in {params.prefix.removesuffix('.')}", _TWO_ROPES_REMEDY)
    return ConfigFile(config.file, saved | added, "rope_scaling beside rope_parameters: ")


def _with_one_type(params: ConfigFile) -> dict[str, object]:
    fields = {"rope_type": params.values.get("type"), **{name: value for name, value in params.values.items() if name != "type"}}
    return {name: value for name, value in fields.items() if value is not None}


def _rotary_dim(config: ConfigFile, params: ConfigFile, head_dim: int, has_partial: bool) -> int:
    owner = params if params.has("partial_rotary_factor") else config
    factor = owner.number("partial_rotary_factor", 0.0, 1.0, default=1.0)
    if factor != 1.0 and not has_partial:
        owner.refuse("partial_rotary_factor", "this architecture rotates whole heads")
    rotary_dim = int(head_dim * factor)
    if rotary_dim < 2 or rotary_dim % 2:
        config.refuse("head_dim", f"rotates {rotary_dim} elements of a head of {head_dim}; an even number is needed")
    return rotary_dim


def _read_scaling(config: ConfigFile, params: ConfigFile, kind: str, max_positions: int, num_pairs: int) -> Scaling | None:
    """num_pairs: rotated pairs of a head."""
    if kind == "default":
        return None
    owner = config if config.has("original_max_position_embeddings") else params
    original = owner.integer("original_max_position_embeddings", 2, MAX_POSITIONS, default=max_positions)
    match kind:
        case "linear":
            return LinearScaling(factor=_factor(params), original_positions=original)
        case "yarn":
            return _read_yarn(params, original, max_positions)
        case "longrope":
            return _read_longrope(params, original, max_positions, num_pairs)
    low, high = params.number("low_freq_factor", 0.0, 1e6), params.number("high_freq_factor", 0.0, 1e6)
    if high <= low:
        params.refuse("high_freq_factor", f"must be above low_freq_factor ({low:g})")
    return Llama3Scaling(factor=_factor(params), low_freq_factor=low, high_freq_factor=high, original_positions=original)


def _read_yarn(params: ConfigFile, original: int, max_positions: int) -> YarnScaling:
    """`attention_factor` is the magnitude; `attn_factor` multiplies the one that follows from the factor, as in vLLM and llama.cpp.

    transformers ignores `attn_factor` with a warning. Where a file has both, readers of one of the two disagree.
    """
    factor = _factor(params, default=max_positions / original)
    mscales = [params.number(name, 0.0, 1e6) if params.has(name) else None for name in ("mscale", "mscale_all_dim")]
    magnitude = yarn_magnitude(factor, *mscales) * params.number("attn_factor", 0.0, 1e6, default=1.0)
    if params.has("attn_factor") and not math.isclose(params.number("attention_factor", 0.0, 1e6, default=magnitude), magnitude):
        params.refuse("attention_factor", f"contradicts attn_factor, which makes it {magnitude:g}", "Leave the wrong one out.")
    return YarnScaling(
        factor=factor,
        original_positions=original,
        beta_fast=params.number("beta_fast", 0.0, 1e6, default=32.0),
        beta_slow=params.number("beta_slow", 0.0, 1e6, default=1.0),
        magnitude=params.number("attention_factor", 0.0, 1e6, default=magnitude),
        truncate=params.flag("truncate", True),
    )


def _read_longrope(params: ConfigFile, original: int, max_positions: int, num_pairs: int) -> LongRopeScaling:
    factor = params.number("factor", 0.0, 1e6, default=max_positions / original)
    return LongRopeScaling(
        short_factors=_factor_per_pair(params, "short_factor", num_pairs),
        long_factors=_factor_per_pair(params, "long_factor", num_pairs),
        original_positions=original,
        magnitude=params.number("attention_factor", 0.0, 1e6, default=longrope_magnitude(factor, original)),
    )


def _factor_per_pair(params: ConfigFile, name: str, num_pairs: int) -> tuple[float, ...]:
    values = params.items(name)
    numbers = [float(value) for value in values if isinstance(value, int | float) and not isinstance(value, bool) and 0 < value <= 1e6]
    if len(numbers) != len(values) or len(numbers) != num_pairs:
        params.refuse(name, f"must be {num_pairs} numbers above 0, one per rotated pair")
    return tuple(numbers)


def _factor(params: ConfigFile, default: float | None = None) -> float:
    factor = params.number("factor", 0.0, 1e6, default=default)
    if factor < 1.0:
        params.refuse("factor", "must be at least 1")
    return factor


def decoder(config: ConfigFile, shape: DecoderShape, layers: Iterable[LayerSpec], names: TensorNames | None = None) -> DecoderSpec:
    layers = tuple(layers)
    return DecoderSpec(
        vocab_size=shape.vocab_size,
        hidden_size=shape.hidden_size,
        max_positions=max(_scaled_positions(config, layer.attention.rope.scaling, shape.max_positions) for layer in layers),
        norm_eps=shape.norm_eps,
        layers=layers,
        is_tied=config.flag("tie_word_embeddings", False),
        names=names or TensorNames(),
    )


def _scaled_positions(config: ConfigFile, scaling: Scaling | None, max_positions: int) -> int:
    """Linear scaling and YaRN are added to a finished model by hand: max_position_embeddings may be the first training's still. Llama 3 and
    LongRoPE come with their models, whose max_position_embeddings is the long one.
    """
    if not isinstance(scaling, LinearScaling | YarnScaling):
        return max_positions
    scaled = round(scaling.original_positions * scaling.factor)
    if scaled > MAX_POSITIONS:
        config.refuse(rope_field(config), f"gives {scaled} positions, more than {MAX_POSITIONS}")
    return max(max_positions, scaled)
