"""Makes tiny checkpoints whose linears are stored as integers, beside the same models stored plainly.

They are packed bit by bit, as the formats' authors describe their files, and share no code with the product.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from copy import deepcopy
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

import torch
from safetensors.torch import save_file
from torch import Tensor

from headrace.tensor.backends import load_backend
from headrace.tensor.batch import ForwardBatch, GroupBatch, allocate_kv
from headrace.tensor.device import CPU
from headrace.tensor.kernels import Backend
from headrace.tensor.models import LoadedModel, load_model

VOCAB, HIDDEN, HEADS, KV_HEADS, HEAD_DIM = 96, 128, 4, 2, 32
FFN = 160
"""Does not divide into groups of 64 or 128."""
TOKENS = [5, 17, 90, 3, 44, 71, 8, 8, 60, 12, 33]
ARCHITECTURES = ("Llama", "Qwen2", "Phi3")
"""Qwen2 has biases at q, k and v; Phi3 stores q/k/v and gate/up fused."""
LINEAR = "model.layers.0.mlp.down_proj"
_CONFIG: dict[str, Any] = {
    "vocab_size": VOCAB, "hidden_size": HIDDEN, "num_hidden_layers": 1, "num_attention_heads": HEADS,
    "num_key_value_heads": KV_HEADS, "head_dim": HEAD_DIM, "max_position_embeddings": 64, "rms_norm_eps": 1e-6, "rope_theta": 1e4,
    "hidden_act": "silu", "tie_word_embeddings": False, "bos_token_id": 1, "eos_token_id": 2, "pad_token_id": 0, "dtype": "float32",
}  # fmt: skip


@dataclass
class Integers:
    """A weight [N, K]: values [N][K] of some bits; zeros and scales [G, N]; groups [K]."""

    values: Tensor
    zeros: Tensor
    scales: Tensor
    groups: Tensor

    def dense(self) -> Tensor:
        """[N, K] float32, one input after the other."""
        scales = self.scales.float()
        columns = [(self.values[:, k] - self.zeros[g]) * scales[g] for k, g in enumerate(self.groups.tolist())]
        return torch.stack(columns, dim=1)


def _draw(
    shape: tuple[int, int],
    bits: int,
    group: int,
    generator: torch.Generator,
    *,
    lowest: int = 0,
    symmetric: bool = False,
    shuffled: bool = False,
) -> Integers:
    """Random integers in groups of `group` inputs; -1: one group. lowest: of the zero points. shuffled: groups in any order."""
    outputs, inputs = shape
    groups = torch.arange(inputs) // (inputs if group == -1 else group)
    count = int(groups[-1]) + 1
    if shuffled:
        groups = groups[torch.randperm(inputs, generator=generator)]
    top = 1 << bits
    scale = 2.5 / (top * inputs**0.5)  # outputs of about the inputs' size
    zeros = torch.randint(lowest, top, (count, outputs), generator=generator)
    return Integers(
        values=torch.randint(0, top, shape, generator=generator),
        zeros=torch.full_like(zeros, top // 2) if symmetric else zeros,
        scales=(scale * (0.5 + torch.rand((count, outputs), generator=generator))).half(),
        groups=groups,
    )


def pack_bits(rows: Sequence[Sequence[int]], bits: int) -> Tensor:
    """Each row as one stream of bits, its first integer in the lowest, cut into int32 words."""
    packed = []
    for row in rows:
        stream = 0
        for place, value in enumerate(row):
            assert 0 <= value < 1 << bits
            stream |= value << (place * bits)
        words = [(stream >> (32 * i)) & 0xFFFFFFFF for i in range(len(row) * bits // 32)]
        packed.append([word - (1 << 32) if word >> 31 else word for word in words])
    return torch.tensor(packed, dtype=torch.int32)


Parts = dict[str, Tensor]


class Stored(Protocol):
    @property
    def section(self) -> dict[str, Any]: ...

    def store(self, shape: tuple[int, int], generator: torch.Generator) -> tuple[Parts, Tensor]:
        """Random parts of a weight [N, K], by their names below the linear's; and the weight, float32."""
        ...


@dataclass
class Gptq:
    """How a model is stored as GPTQ. version: 1 or 2."""

    bits: int = 4
    group: int = 32
    symmetric: bool = False
    desc_act: bool = False
    version: int = 1

    def __str__(self) -> str:
        return f"{self.bits}-{self.group}-{'sym' if self.symmetric else 'asym'}{'-act' if self.desc_act else ''}-v{self.version}"

    @property
    def section(self) -> dict[str, Any]:
        return {
            "quant_method": "gptq", "bits": self.bits, "group_size": self.group, "sym": self.symmetric, "desc_act": self.desc_act,
            "checkpoint_format": "gptq" if self.version == 1 else "gptq_v2", "true_sequential": True, "damp_percent": 0.01,
            "static_groups": False, "lm_head": False,
        }  # fmt: skip

    def store(self, shape: tuple[int, int], generator: torch.Generator) -> tuple[Parts, Tensor]:
        lowest = 1 if self.version == 1 else 0
        drawn = _draw(shape, self.bits, self.group, generator, lowest=lowest, symmetric=self.symmetric, shuffled=self.desc_act)
        parts = {
            "qweight": pack_bits(drawn.values.tolist(), self.bits).t().contiguous(),
            "qzeros": pack_bits((drawn.zeros - lowest).tolist(), self.bits),
            "scales": drawn.scales,
            "g_idx": drawn.groups.int(),
        }
        return parts, drawn.dense()


@dataclass
class Awq:
    group: int = 32
    symmetric: bool = False

    @property
    def section(self) -> dict[str, Any]:
        """As AutoAWQ writes it, and AutoRound symmetric weights."""
        return {
            "quant_method": "awq", "bits": 4, "group_size": self.group, "zero_point": not self.symmetric, "version": "gemm",
            "modules_to_not_convert": None,
        }  # fmt: skip

    def store(self, shape: tuple[int, int], generator: torch.Generator) -> tuple[Parts, Tensor]:
        drawn = _draw(shape, 4, self.group, generator, symmetric=self.symmetric)
        parts = {
            "qweight": pack_bits([_awq_order(row) for row in drawn.values.t().tolist()], 4),
            "qzeros": pack_bits([_awq_order(row) for row in drawn.zeros.tolist()], 4),
            "scales": drawn.scales,
        }
        return parts, drawn.dense()


def _awq_order(outputs: list[int]) -> list[int]:
    """Of eight outputs the even ones first, then the odd ones."""
    eights = [outputs[i : i + 8] for i in range(0, len(outputs), 8)]
    return [value for eight in eights for value in (*eight[0::2], *eight[1::2])]


@dataclass
class Pair:
    """One model in two folders: `folder` holds its linears as parts, `plain` as the weights that these stand for.

    config, tensors  of `folder`
    dense            the weights that are stored as parts, by name
    """

    folder: Path
    plain: Path
    config: dict[str, Any]
    tensors: Parts
    dense: Parts

    def write(self) -> None:
        _write(self.folder, self.config, self.tensors)

    def copied(self, folder: Path) -> Pair:
        """The same beside `plain`, to be spoilt."""
        copy = Pair(folder, self.plain, deepcopy(self.config), {name: tensor.clone() for name, tensor in self.tensors.items()}, self.dense)
        copy.write()
        return copy

    @property
    def section(self) -> dict[str, Any]:
        section: dict[str, Any] = self.config["quantization_config"]
        return section


def save_pair(path: Path, architecture: str, stored: Stored, *, ffn: int = FFN, head: bool = False, plain: tuple[str, ...] = ()) -> Pair:
    """A random model. head: lm_head is quantized too. plain: names of linears that are stored plainly all the same."""
    generator = torch.Generator().manual_seed(0)
    linears = {f"model.layers.0.{name}": shape for name, shape in _linears(architecture, ffn).items()} | {"lm_head": (VOCAB, HIDDEN)}
    kept: Parts = {"model.embed_tokens.weight": torch.randn((VOCAB, HIDDEN), generator=generator)}
    for name in ("model.norm", "model.layers.0.input_layernorm", "model.layers.0.post_attention_layernorm"):
        kept[f"{name}.weight"] = 1 + 0.2 * torch.randn(HIDDEN, generator=generator)
    for name, (outputs, _) in linears.items():
        if architecture == "Qwen2" and name.endswith(("q_proj", "k_proj", "v_proj")):
            kept[f"{name}.bias"] = 0.3 * torch.randn(outputs, generator=generator)
    parts: Parts = {}
    dense: Parts = {}
    for name, shape in linears.items():
        if name in plain or (name == "lm_head" and not head):
            kept[f"{name}.weight"] = torch.randn(shape, generator=generator) / shape[1] ** 0.5
            continue
        made, dense[f"{name}.weight"] = stored.store(shape, generator)
        parts |= {f"{name}.{part}": tensor for part, tensor in made.items()}
    config = {**_CONFIG, "architectures": [f"{architecture}ForCausalLM"], "model_type": architecture.lower(), "intermediate_size": ffn}
    pair = Pair(path / "quantized", path / "plain", {**config, "quantization_config": dict(stored.section)}, kept | parts, dense)
    pair.write()
    _write(pair.plain, config, kept | dense)
    return pair


def _linears(architecture: str, ffn: int) -> dict[str, tuple[int, int]]:
    """Name in the layer -> shape [N, K]."""
    queries, keys = HEADS * HEAD_DIM, KV_HEADS * HEAD_DIM
    both = {"self_attn.o_proj": (HIDDEN, queries), "mlp.down_proj": (HIDDEN, ffn)}
    if architecture == "Phi3":
        return both | {"self_attn.qkv_proj": (queries + 2 * keys, HIDDEN), "mlp.gate_up_proj": (2 * ffn, HIDDEN)}
    attention = {"self_attn.q_proj": (queries, HIDDEN), "self_attn.k_proj": (keys, HIDDEN), "self_attn.v_proj": (keys, HIDDEN)}
    return both | attention | {"mlp.gate_proj": (ffn, HIDDEN), "mlp.up_proj": (ffn, HIDDEN)}


def _write(folder: Path, config: dict[str, Any], tensors: Parts) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text(json.dumps(config))
    save_file({name: tensor.contiguous() for name, tensor in tensors.items()}, folder / "model.safetensors")


def load(folder: Path, *, backend: Backend | None = None, **options: Any) -> LoadedModel:
    given: dict[str, Any] = {"dtype": torch.float32, "device": CPU, "load_format": "auto", "seed": 0, "max_model_len": None, **options}
    return load_model(folder, backend=backend or load_backend("reference"), **given)


def logits(loaded: LoadedModel) -> Tensor:
    """[len(TOKENS), VOCAB] of one prompt."""
    model, count, blocks = loaded.model, len(TOKENS), 4
    kv = allocate_kv(model.kv_shapes, model.group_of, (blocks + 1,), 4, torch.float32, CPU)
    batch = ForwardBatch(
        positions=torch.arange(count),
        row_starts=torch.tensor([0, count], dtype=torch.int32),
        context_lens=torch.tensor([count], dtype=torch.int32),
        max_count=count,
        groups=(GroupBatch(torch.arange(1, blocks + 1, dtype=torch.int32)[None], torch.arange(4, 4 + count)),),
        selected=None,
    )
    with torch.inference_mode():
        return model.logits(model.forward(torch.tensor(TOKENS), batch, kv))
