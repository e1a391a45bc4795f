"""Gemma 3, text only: local layers (window, their own rotary base) between global ones, norms before and after each branch, norm weights
stored as w - 1, embeddings scaled by sqrt(hidden size)."""

from __future__ import annotations

from dataclasses import replace

from headrace.tensor.checkpoint.config import ConfigFile
from headrace.tensor.layers.attention import AttentionNames
from headrace.tensor.layers.mlp import MlpSpec
from headrace.tensor.layers.rope import RopeSpec, YarnScaling
from headrace.tensor.models.fields import (
    MAX_LAYERS,
    MAX_WIDTH,
    DecoderShape,
    attention_spec,
    decoder,
    read_activation,
    read_rope,
    read_shape,
    read_window,
    refuse_set,
    windows_by_type,
)
from headrace.tensor.models.spec import DecoderSpec, LayerSpec, TensorNames

NAMES = TensorNames(
    attention_output_norm="post_attention_layernorm",
    mlp_norm="pre_feedforward_layernorm",
    mlp_output_norm="post_feedforward_layernorm",
    attention=AttentionNames(q_norm="self_attn.q_norm", k_norm="self_attn.k_norm"),
)
DEFAULTS = {
    "vocab_size": 262_208,
    "num_attention_heads": 8,
    "num_key_value_heads": 4,
    "head_dim": 256,
    "max_position_embeddings": 131_072,
}
"""Left out of its authors' own files; the values are those of the class in transformers."""


def decoder_spec(config: ConfigFile) -> DecoderSpec:
    config = ConfigFile(config.file, {**DEFAULTS, **config.values}, config.prefix)
    refuse_set(config, "attn_logit_softcapping", "final_logit_softcapping", "use_bidirectional_attention", "mlp_bias")
    shape, has_bias = read_shape(config), config.flag("attention_bias", False)
    scale = config.number("query_pre_attn_scalar", 0.0, 1e9, default=256.0) ** -0.5
    mlp = MlpSpec(
        size=config.integer("intermediate_size", 1, MAX_WIDTH),
        activation=read_activation(config, "hidden_activation", "gelu_pytorch_tanh"),
    )
    local_rope, global_rope = _read_ropes(config, shape)
    layers = []
    for window in _read_windows(config, shape.num_layers):
        rope = global_rope if window is None else local_rope
        attention = attention_spec(shape, rope, window=window, qkv_bias=has_bias, output_bias=has_bias)
        layers.append(LayerSpec(attention=replace(attention, scale=scale), mlp=mlp))
    spec = decoder(config, shape, layers, NAMES)
    return replace(
        spec,
        # Linear scaling comes with the model and is counted in max_position_embeddings; YaRN is added by hand.
        max_positions=spec.max_positions if isinstance(global_rope.scaling, YarnScaling) else shape.max_positions,
        norm_plus=1.0,
        embedding_scale=shape.hidden_size**0.5,
        is_tied=config.flag("tie_word_embeddings", True),
    )


def _read_windows(config: ConfigFile, num_layers: int) -> list[int | None]:
    """From `layer_types`, or, in older files, from `sliding_window_pattern`: every n-th layer is global."""
    window = read_window(config) or 4096
    if config.has("layer_types"):
        return windows_by_type(config, window, num_layers)
    pattern = config.integer("sliding_window_pattern", 1, MAX_LAYERS, default=6)
    return [window if (index + 1) % pattern else None for index in range(num_layers)]


def _read_ropes(config: ConfigFile, shape: DecoderShape) -> tuple[RopeSpec, RopeSpec]:
    """(local, global). In older files `rope_scaling` applies to the global layers alone."""
    unscaled = ConfigFile(config.file, {name: value for name, value in config.values.items() if name != "rope_scaling"})
    return (
        read_rope(unscaled, shape, theta=1e4, layer_type="sliding_attention", theta_field="rope_local_base_freq"),
        read_rope(config, shape, theta=1e6, layer_type="full_attention"),
    )
