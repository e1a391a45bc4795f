"""Mistral: Llama with a sliding window on every layer, or on none."""

from __future__ import annotations

from headrace.tensor.checkpoint.config import ConfigFile
from headrace.tensor.models.fields import attention_spec, decoder, read_mlp, read_rope, read_shape, read_window, refuse_set
from headrace.tensor.models.spec import DecoderSpec, LayerSpec


def decoder_spec(config: ConfigFile) -> DecoderSpec:
    refuse_set(config, "layer_types", "attention_bias", "mlp_bias")
    shape = read_shape(config)
    attention = attention_spec(shape, read_rope(config, shape), window=read_window(config, default=4096))
    return decoder(config, shape, [LayerSpec(attention=attention, mlp=read_mlp(config))] * shape.num_layers)
