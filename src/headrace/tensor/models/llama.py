"""Llama 2 and 3: the plain decoder the other families vary."""

from __future__ import annotations

from headrace.tensor.checkpoint_config import ConfigFile
from headrace.tensor.layers.attention import AttentionSpec
from headrace.tensor.layers.mlp import MlpSpec
from headrace.tensor.models.fields import MAX_WIDTH, read_activation, read_rope, read_shape
from headrace.tensor.models.spec import DecoderSpec, LayerSpec


def decoder_spec(config: ConfigFile) -> DecoderSpec:
    shape = read_shape(config)
    has_bias = config.flag("attention_bias", False)
    attention = AttentionSpec(
        heads=shape.heads,
        kv_heads=shape.kv_heads,
        head_dim=shape.head_dim,
        scale=shape.head_dim**-0.5,
        rope=read_rope(config, shape),
        qkv_bias=has_bias,
        output_bias=has_bias,
    )
    mlp = MlpSpec(
        size=config.integer("intermediate_size", 1, MAX_WIDTH),
        activation=read_activation(config),
        bias=config.flag("mlp_bias", False),
    )
    return DecoderSpec(
        vocab_size=shape.vocab_size,
        hidden_size=shape.hidden_size,
        max_positions=shape.max_positions,
        norm_eps=shape.norm_eps,
        layers=(LayerSpec(attention=attention, mlp=mlp),) * shape.num_layers,
        is_tied=config.flag("tie_word_embeddings", False),
    )
