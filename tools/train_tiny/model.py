"""Defines a lean Llama for training on a CPU, and exports it to the Hugging Face layout.

Not an inference model: there is no KV cache here. It exists because the training loop wants two things that the stock
module does not give: fused projections (fewer, larger GEMMs) and logits for the supervised rows only (the vocabulary
matrix is a third of the work of a model this small). `state_to_hf` writes the names `LlamaForCausalLM` reads;
tests/tools/test_training_tools.py holds both to the same logits.

Shape letters: B rows, T positions, D hidden, H query heads, K KV heads, E head dim, F feed-forward, V vocabulary.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn


@dataclass(frozen=True, slots=True)
class TinyConfig:
    """The shape of one model; `hf_config` spells it the way `config.json` does."""

    hidden_size: int
    num_layers: int
    num_heads: int
    num_kv_heads: int
    intermediate_size: int
    vocab_size: int = 2560
    head_dim: int = 32
    rope_theta: float = 10000.0
    rms_norm_eps: float = 1e-5
    max_position_embeddings: int = 2048


TINY = TinyConfig(hidden_size=192, num_layers=6, num_heads=6, num_kv_heads=2, intermediate_size=384)
DRAFT = TinyConfig(hidden_size=96, num_layers=2, num_heads=3, num_kv_heads=1, intermediate_size=192)


def rotate(x_BHTE: Tensor, cos_TE: Tensor, sin_TE: Tensor) -> Tensor:
    """Rotary position embedding in the half-split form of Llama (Su et al. 2021)."""
    first, second = x_BHTE.chunk(2, dim=-1)
    return x_BHTE * cos_TE + torch.cat((-second, first), dim=-1) * sin_TE


def attend(q_BHTE: Tensor, k_BHTE: Tensor, v_BHTE: Tensor, mask_TT: Tensor) -> Tensor:
    """Causal attention by two plain products: in bf16, on short rows and a CPU, twice to nine times as fast as torch's fused attention."""
    shape, (length, dim) = q_BHTE.shape, q_BHTE.shape[-2:]
    q, k, v = (x.reshape(-1, length, dim) for x in (q_BHTE, k_BHTE, v_BHTE))
    dtype = torch.get_autocast_dtype(q.device.type) if torch.is_autocast_enabled(q.device.type) else q.dtype
    with torch.autocast(q.device.type, enabled=False):  # which would compute the softmax in fp32
        q, k, v = q.to(dtype), k.to(dtype), v.to(dtype)
        scores = torch.baddbmm(mask_TT.to(dtype).expand(len(q), length, length), q, k.transpose(1, 2), alpha=dim**-0.5)
        return torch.bmm(scores.softmax(-1), v).view(shape)


class Block(nn.Module):
    """One pre-norm decoder layer with fused qkv and gate/up projections."""

    def __init__(self, config: TinyConfig) -> None:
        super().__init__()
        self.config = config
        width, kv_width = config.num_heads * config.head_dim, config.num_kv_heads * config.head_dim
        self.qkv = nn.Linear(config.hidden_size, width + 2 * kv_width, bias=False)
        self.o = nn.Linear(width, config.hidden_size, bias=False)
        self.gate_up = nn.Linear(config.hidden_size, 2 * config.intermediate_size, bias=False)
        self.down = nn.Linear(config.intermediate_size, config.hidden_size, bias=False)
        self.attn_norm = nn.Parameter(torch.ones(config.hidden_size))
        self.mlp_norm = nn.Parameter(torch.ones(config.hidden_size))

    def forward(self, x_BTD: Tensor, cos_TE: Tensor, sin_TE: Tensor, mask_TT: Tensor) -> Tensor:
        c = self.config
        batch, length, dim = x_BTD.shape
        normed = F.rms_norm(x_BTD, (dim,), self.attn_norm, c.rms_norm_eps)
        qkv = self.qkv(normed).view(batch, length, -1, c.head_dim).transpose(1, 2)
        q, k, v = qkv.split((c.num_heads, c.num_kv_heads, c.num_kv_heads), dim=1)
        q, k = rotate(q, cos_TE, sin_TE), rotate(k, cos_TE, sin_TE)
        group = c.num_heads // c.num_kv_heads
        k, v = k.repeat_interleave(group, dim=1), v.repeat_interleave(group, dim=1)
        mixed = attend(q, k, v, mask_TT)
        x_BTD = x_BTD + self.o(mixed.transpose(1, 2).reshape(batch, length, -1))
        gate, up = self.gate_up(F.rms_norm(x_BTD, (dim,), self.mlp_norm, c.rms_norm_eps)).chunk(2, dim=-1)
        out: Tensor = x_BTD + self.down(F.silu(gate) * up)
        return out


class TinyLlama(nn.Module):
    """Embedding, blocks, final norm; the output matrix is the embedding (tied)."""

    cos: Tensor
    sin: Tensor

    def __init__(self, config: TinyConfig) -> None:
        super().__init__()
        self.config = config
        self.embed = nn.Embedding(config.vocab_size, config.hidden_size)
        self.blocks = nn.ModuleList(Block(config) for _ in range(config.num_layers))
        self.norm = nn.Parameter(torch.ones(config.hidden_size))
        inverse = config.rope_theta ** (-torch.arange(0, config.head_dim, 2, dtype=torch.float64) / config.head_dim)
        angles = torch.outer(torch.arange(config.max_position_embeddings, dtype=torch.float64), inverse).repeat(1, 2)
        self.register_buffer("cos", angles.cos().float(), persistent=False)
        self.register_buffer("sin", angles.sin().float(), persistent=False)
        self.init_weights()

    def init_weights(self) -> None:
        """Small normal init; the two projections that write the residual stream start scaled down by depth."""
        nn.init.normal_(self.embed.weight, std=0.05)
        depth = (2 * self.config.num_layers) ** -0.5
        for block in self.blocks:
            for name, parameter in block.named_parameters():
                if parameter.ndim == 2:
                    std = parameter.shape[1] ** -0.5 * (depth if name in ("o.weight", "down.weight") else 1.0)
                    nn.init.normal_(parameter, std=std)

    def hidden(self, ids_BT: Tensor) -> Tensor:
        """Final normed hidden states [B, T, D]; rows are right-padded, so the causal mask alone is enough."""
        length = ids_BT.shape[1]
        cos, sin = self.cos[:length], self.sin[:length]
        x = self.embed(ids_BT)
        mask = torch.full((length, length), float("-inf"), device=x.device).triu_(1)
        for block in self.blocks:
            x = block(x, cos, sin, mask)
        return F.rms_norm(x, (self.config.hidden_size,), self.norm, self.config.rms_norm_eps)

    def loss_sum(self, ids_BT: Tensor, weights_BT: Tensor) -> Tensor:
        """Summed cross entropy of the supervised tokens: weights_BT[b, t] weighs the prediction *of* ids_BT[b, t]."""
        hidden = self.hidden(ids_BT)[:, :-1]
        weights = weights_BT[:, 1:]
        rows = weights > 0
        logits = F.linear(hidden[rows], self.embed.weight)
        losses = F.cross_entropy(logits, ids_BT[:, 1:][rows], reduction="none")
        return (losses * weights[rows]).sum()


def num_parameters(config: TinyConfig) -> int:
    """Parameters of the stored model (the tied output matrix counts once)."""
    return sum(p.numel() for p in TinyLlama(config).parameters())


def state_to_hf(state: Mapping[str, Tensor], config: TinyConfig) -> dict[str, Tensor]:
    """Rename and unfuse into the tensors of `LlamaForCausalLM`, rounded to bf16."""
    width, kv_width = config.num_heads * config.head_dim, config.num_kv_heads * config.head_dim
    out = {"model.embed_tokens.weight": state["embed.weight"], "model.norm.weight": state["norm"]}
    for i in range(config.num_layers):
        source, target = f"blocks.{i}.", f"model.layers.{i}."
        q, k, v = torch.split(state[source + "qkv.weight"], [width, kv_width, kv_width])
        gate, up = state[source + "gate_up.weight"].chunk(2)
        out |= {target + f"self_attn.{n}_proj.weight": w for n, w in zip("qkvo", (q, k, v, state[source + "o.weight"]), strict=True)}
        out |= {target + f"mlp.{n}_proj.weight": w for n, w in (("gate", gate), ("up", up), ("down", state[source + "down.weight"]))}
        out[target + "input_layernorm.weight"] = state[source + "attn_norm"]
        out[target + "post_attention_layernorm.weight"] = state[source + "mlp_norm"]
    return {name: tensor.detach().to(torch.bfloat16).contiguous().clone() for name, tensor in out.items()}


def state_from_hf(tensors: Mapping[str, Tensor], config: TinyConfig) -> dict[str, Tensor]:
    """The inverse of `state_to_hf`, in fp32."""
    out = {"embed.weight": tensors["model.embed_tokens.weight"], "norm": tensors["model.norm.weight"]}
    for i in range(config.num_layers):
        source, target = f"model.layers.{i}.", f"blocks.{i}."
        out[target + "qkv.weight"] = torch.cat([tensors[source + f"self_attn.{n}_proj.weight"] for n in "qkv"])
        out[target + "o.weight"] = tensors[source + "self_attn.o_proj.weight"]
        out[target + "gate_up.weight"] = torch.cat([tensors[source + f"mlp.{n}_proj.weight"] for n in ("gate", "up")])
        out[target + "down.weight"] = tensors[source + "mlp.down_proj.weight"]
        out[target + "attn_norm"] = tensors[source + "input_layernorm.weight"]
        out[target + "mlp_norm"] = tensors[source + "post_attention_layernorm.weight"]
    return {name: tensor.float() for name, tensor in out.items()}


def config_from_hf(config: Mapping[str, Any]) -> TinyConfig:
    """The shape that a `config.json` of ours names."""
    return TinyConfig(
        hidden_size=config["hidden_size"],
        num_layers=config["num_hidden_layers"],
        num_heads=config["num_attention_heads"],
        num_kv_heads=config["num_key_value_heads"],
        intermediate_size=config["intermediate_size"],
        vocab_size=config["vocab_size"],
        head_dim=config["head_dim"],
        rope_theta=config["rope_theta"],
    )


def hf_config(config: TinyConfig) -> dict[str, object]:
    """The content of `config.json`."""
    return {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "vocab_size": config.vocab_size,
        "hidden_size": config.hidden_size,
        "intermediate_size": config.intermediate_size,
        "num_hidden_layers": config.num_layers,
        "num_attention_heads": config.num_heads,
        "num_key_value_heads": config.num_kv_heads,
        "head_dim": config.head_dim,
        "hidden_act": "silu",
        "max_position_embeddings": config.max_position_embeddings,
        "rms_norm_eps": config.rms_norm_eps,
        "rope_theta": config.rope_theta,
        "rope_scaling": None,
        "attention_bias": False,
        "mlp_bias": False,
        "tie_word_embeddings": True,
        "bos_token_id": 0,
        "eos_token_id": [2, 0],
        "pad_token_id": 3,
        "torch_dtype": "bfloat16",
    }
