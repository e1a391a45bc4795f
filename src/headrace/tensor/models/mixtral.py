"""Mixtral: Mistral's attention, and experts on every layer. The chosen experts' weights are scaled to sum to one."""

from __future__ import annotations

from headrace.tensor.checkpoint.config import ConfigFile
from headrace.tensor.layers.moe import MoeNames, MoeSpec
from headrace.tensor.models.fields import (
    MAX_WIDTH,
    attention_spec,
    decoder,
    read_activation,
    read_rope,
    read_shape,
    read_top_k,
    read_window,
    refuse_set,
)
from headrace.tensor.models.spec import DecoderSpec, LayerSpec, TensorNames

NAMES = TensorNames(moe=MoeNames(blocks=("block_sparse_moe", "mlp"), gate="w1", up="w3", down="w2"))


def decoder_spec(config: ConfigFile) -> DecoderSpec:
    refuse_set(config, "layer_types", "attention_bias", "mlp_bias")
    if not config.flag("norm_topk_prob", True):
        config.refuse("norm_topk_prob", "the weights of a token's experts always sum to one in Mixtral")
    shape = read_shape(config, norm_eps=1e-5)
    num_experts = config.integer("num_local_experts", 1, 4096, default=8)
    moe = MoeSpec(
        num_experts=num_experts,
        top_k=read_top_k(config, num_experts, default=2),
        size=config.integer("intermediate_size", 1, MAX_WIDTH),
        is_renormalised=True,
        activation=read_activation(config),
    )
    attention = attention_spec(shape, read_rope(config, shape, theta=1e6), window=read_window(config))
    return decoder(config, shape, [LayerSpec(attention=attention, mlp=moe)] * shape.num_layers, NAMES)
