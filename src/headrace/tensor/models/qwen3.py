"""Qwen 3, dense: query and key heads are normalised before they are rotated."""

from __future__ import annotations

from headrace.tensor.checkpoint.config import ConfigFile
from headrace.tensor.layers.attention import AttentionNames
from headrace.tensor.models.fields import attention_spec, decoder, read_layer_windows, read_mlp, read_rope, read_shape, refuse_set
from headrace.tensor.models.spec import DecoderSpec, LayerSpec, TensorNames

NAMES = TensorNames(attention=AttentionNames(q_norm="self_attn.q_norm", k_norm="self_attn.k_norm"))


def decoder_spec(config: ConfigFile) -> DecoderSpec:
    refuse_set(config, "mlp_bias")
    shape, mlp = read_shape(config, head_dim=128), read_mlp(config)
    rope, has_bias = read_rope(config, shape), config.flag("attention_bias", False)
    layers = [
        LayerSpec(attention=attention_spec(shape, rope, window=window, qkv_bias=has_bias, output_bias=has_bias), mlp=mlp)
        for window in read_layer_windows(config, shape.num_layers)
    ]
    return decoder(config, shape, layers, NAMES)
