"""Llama 2 and 3: the plain decoder the other families vary."""

from __future__ import annotations

from headrace.tensor.checkpoint.config import ConfigFile
from headrace.tensor.models.fields import attention_spec, decoder, read_mlp, read_rope, read_shape, refuse_set, windows_by_type
from headrace.tensor.models.spec import DecoderSpec, LayerSpec


def decoder_spec(config: ConfigFile) -> DecoderSpec:
    refuse_set(config, "use_sliding_window")
    shape = read_shape(config)
    if config.has("layer_types"):
        windows_by_type(config, None, shape.num_layers)
    has_bias = config.flag("attention_bias", False)
    layer = LayerSpec(
        attention=attention_spec(shape, read_rope(config, shape), qkv_bias=has_bias, output_bias=has_bias),
        mlp=read_mlp(config, bias=config.flag("mlp_bias", False)),
    )
    return decoder(config, shape, [layer] * shape.num_layers)
