"""Qwen 3 mixture of experts: Qwen 3's attention, experts on every `decoder_sparse_step`-th layer not in `mlp_only_layers`."""

from __future__ import annotations

from headrace.tensor.checkpoint.config import ConfigFile
from headrace.tensor.layers.moe import MoeSpec
from headrace.tensor.models.fields import (
    MAX_LAYERS,
    MAX_WIDTH,
    attention_spec,
    decoder,
    read_activation,
    read_mlp,
    read_rope,
    read_shape,
    read_top_k,
    read_window,
    refuse_set,
)
from headrace.tensor.models.qwen3 import NAMES
from headrace.tensor.models.spec import DecoderSpec, LayerSpec


def decoder_spec(config: ConfigFile) -> DecoderSpec:
    refuse_set(config, "mlp_bias", "layer_types", "shared_expert_intermediate_size")
    shape, has_bias = read_shape(config), config.flag("attention_bias", False)
    window = read_window(config) if config.flag("use_sliding_window", False) else None
    attention = attention_spec(shape, read_rope(config, shape), window=window, qkv_bias=has_bias, output_bias=has_bias)
    sparse = _sparse_layers(config, shape.num_layers)
    moe, dense = _read_moe(config), read_mlp(config)
    layers = [LayerSpec(attention=attention, mlp=moe if index in sparse else dense) for index in range(shape.num_layers)]
    return decoder(config, shape, layers, NAMES)


def _sparse_layers(config: ConfigFile, num_layers: int) -> set[int]:
    step = config.integer("decoder_sparse_step", 1, MAX_LAYERS, default=1)
    dense = config.items("mlp_only_layers")
    if not all(isinstance(index, int) and 0 <= index < num_layers for index in dense):
        config.refuse("mlp_only_layers", f"must be layer indices from 0 to {num_layers - 1}")
    return {index for index in range(num_layers) if index not in dense and (index + 1) % step == 0}


def _read_moe(config: ConfigFile) -> MoeSpec:
    # transformers 5 writes num_local_experts, older files num_experts.
    num_experts = config.integer("num_local_experts" if config.has("num_local_experts") else "num_experts", 1, 4096)
    return MoeSpec(
        num_experts=num_experts,
        top_k=read_top_k(config, num_experts, default=8),
        size=config.integer("moe_intermediate_size", 1, MAX_WIDTH),
        is_renormalised=config.flag("norm_topk_prob", False),
        activation=read_activation(config),
    )
