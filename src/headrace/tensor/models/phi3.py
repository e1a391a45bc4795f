"""Phi-3 and Phi-4-mini: Llama whose q/k/v and gate/up are stored fused, and which may rotate a part of each head only."""

from __future__ import annotations

from headrace.tensor.checkpoint.config import ConfigFile
from headrace.tensor.layers.attention import AttentionNames
from headrace.tensor.layers.mlp import MlpNames
from headrace.tensor.models.fields import attention_spec, decoder, read_mlp, read_rope, read_shape, read_window, refuse_set
from headrace.tensor.models.spec import DecoderSpec, LayerSpec, TensorNames

NAMES = TensorNames(
    attention=AttentionNames(qkv=("self_attn.qkv_proj",)),
    mlp=MlpNames(gate_up=("mlp.gate_up_proj",)),
)


def decoder_spec(config: ConfigFile) -> DecoderSpec:
    refuse_set(config, "layer_types", "attention_bias", "mlp_bias")
    shape = read_shape(config, norm_eps=1e-5)
    rope = read_rope(config, shape, has_partial=True)
    if rope.scaling is not None:  # transformers reads Phi-3's "yarn" as longrope, and knows no other
        config.refuse("rope_scaling" if config.has("rope_scaling") else "rope_parameters", "Phi-3 is supported without rope scaling")
    attention = attention_spec(shape, rope, window=read_window(config))
    return decoder(config, shape, [LayerSpec(attention=attention, mlp=read_mlp(config))] * shape.num_layers, NAMES)
