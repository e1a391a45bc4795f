"""Phi-3 and Phi-4-mini: Llama whose q/k/v and gate/up are stored fused, and which may rotate a part of each head only.
Contexts beyond the first training's are LongRoPE's."""

from __future__ import annotations

from headrace.tensor.checkpoint.config import ConfigFile
from headrace.tensor.layers.attention import AttentionNames
from headrace.tensor.layers.mlp import MlpNames
from headrace.tensor.layers.rope import LongRopeScaling
from headrace.tensor.models.fields import (
    attention_spec,
    decoder,
    read_mlp,
    read_rope,
    read_shape,
    read_window,
    refuse_set,
    rope_field,
)
from headrace.tensor.models.spec import DecoderSpec, LayerSpec, TensorNames

NAMES = TensorNames(
    attention=AttentionNames(qkv=("self_attn.qkv_proj",)),
    mlp=MlpNames(gate_up=("mlp.gate_up_proj",)),
)


def decoder_spec(config: ConfigFile) -> DecoderSpec:
    refuse_set(config, "layer_types", "attention_bias", "mlp_bias")
    config = _with_names_of_today(config)
    shape = read_shape(config, norm_eps=1e-5)
    rope = read_rope(config, shape, has_partial=True)
    if not isinstance(rope.scaling, LongRopeScaling | None):
        config.refuse(rope_field(config), "Phi-3 is supported with LongRoPE or without rope scaling")
    attention = attention_spec(shape, rope, window=read_window(config))
    return decoder(config, shape, [LayerSpec(attention=attention, mlp=read_mlp(config))] * shape.num_layers, NAMES)


def _with_names_of_today(config: ConfigFile) -> ConfigFile:
    """ "su" and "yarn" were names of Phi-3's LongRoPE, and its first training had 4,096 positions."""
    values = dict(config.values)
    for field in ("rope_scaling", "rope_parameters"):
        if isinstance(params := values.get(field), dict):
            values[field] = {name: "longrope" if value in ("su", "yarn") else value for name, value in params.items()}
    return ConfigFile(config.file, {**values, "original_max_position_embeddings": values.get("original_max_position_embeddings") or 4096})
