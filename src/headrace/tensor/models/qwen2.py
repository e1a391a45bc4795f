"""Qwen 2 and 2.5: biases on q, k and v; a sliding window on the upper layers when `use_sliding_window`."""

from __future__ import annotations

from headrace.tensor.checkpoint.config import ConfigFile
from headrace.tensor.models.fields import attention_spec, decoder, read_layer_windows, read_mlp, read_rope, read_shape, refuse_set
from headrace.tensor.models.spec import DecoderSpec, LayerSpec


def decoder_spec(config: ConfigFile) -> DecoderSpec:
    refuse_set(config, "attention_bias", "mlp_bias")
    shape, mlp = read_shape(config), read_mlp(config)
    rope = read_rope(config, shape)
    windows = read_layer_windows(config, shape.num_layers)
    layers = [LayerSpec(attention=attention_spec(shape, rope, window=window, qkv_bias=True), mlp=mlp) for window in windows]
    return decoder(config, shape, layers)
