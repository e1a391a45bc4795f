"""Provides a tiny Llama checkpoint, a dense forward of it that shares no code with the product, and plans written by hand."""

from __future__ import annotations

import json
from array import array
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Protocol

import torch
from plain_masks import Language
from safetensors.torch import load_file, save_file
from torch import Tensor
from torch.nn import functional as F

from headrace.core.grammar import Grammar
from headrace.core.ids import SlotId
from headrace.core.plan import SYNCHRONOUS, Plan, Result, Started
from headrace.core.sampling import SamplingParams
from headrace.engine.runner.batch import Resident
from headrace.engine.runner.drafts import Drafter
from headrace.engine.runner.masks import MaskSource
from headrace.engine.runner.model_runner import Model, ModelRunner
from headrace.engine.runner.slots import SlotState
from headrace.tensor.backends import load_backend
from headrace.tensor.batch import PackedAdapter, allocate_kv
from headrace.tensor.device import CPU
from headrace.tensor.kernels import LowRankUpdate
from headrace.tensor.kernels.filters import draw
from headrace.tensor.layers.adapted import AdaptedPart
from headrace.tensor.models import load_model
from headrace.tensor.models.decoder import DecoderModel
from headrace.tensor.sampling import Sampler

VOCAB, HIDDEN, LAYERS, HEADS, KV_HEADS, HEAD_DIM, FFN, CONTEXT = 101, 32, 2, 4, 2, 8, 48, 96
GREEDY = SamplingParams(temperature=0.0, seed=0, max_tokens=None)
Row = tuple[int, int, int, int]
"""slot, start, count, samples"""


def save_tiny_llama(folder: Path, *, seed: int = 0) -> Path:
    """Random weights, large enough that the best logit is clear of the second."""
    draw = torch.Generator().manual_seed(seed)

    def weight(*shape: int) -> Tensor:
        return torch.randn(shape, generator=draw).mul(1.5 * shape[-1] ** -0.5)

    tensors = {
        "model.embed_tokens.weight": weight(VOCAB, HIDDEN),
        "model.norm.weight": 1 + 0.1 * weight(HIDDEN),
        "lm_head.weight": weight(VOCAB, HIDDEN),
    }
    for i in range(LAYERS):
        at = f"model.layers.{i}."
        tensors |= {
            f"{at}input_layernorm.weight": 1 + 0.1 * weight(HIDDEN),
            f"{at}post_attention_layernorm.weight": 1 + 0.1 * weight(HIDDEN),
            f"{at}self_attn.q_proj.weight": weight(HEADS * HEAD_DIM, HIDDEN),
            f"{at}self_attn.k_proj.weight": weight(KV_HEADS * HEAD_DIM, HIDDEN),
            f"{at}self_attn.v_proj.weight": weight(KV_HEADS * HEAD_DIM, HIDDEN),
            f"{at}self_attn.o_proj.weight": weight(HIDDEN, HEADS * HEAD_DIM),
            f"{at}mlp.gate_proj.weight": weight(FFN, HIDDEN),
            f"{at}mlp.up_proj.weight": weight(FFN, HIDDEN),
            f"{at}mlp.down_proj.weight": weight(HIDDEN, FFN),
        }
    folder.mkdir(parents=True, exist_ok=True)
    save_file({name: tensor.contiguous() for name, tensor in tensors.items()}, folder / "model.safetensors")
    config: dict[str, Any] = {
        "architectures": ["LlamaForCausalLM"], "model_type": "llama", "vocab_size": VOCAB, "hidden_size": HIDDEN,
        "intermediate_size": FFN, "num_hidden_layers": LAYERS, "num_attention_heads": HEADS, "num_key_value_heads": KV_HEADS,
        "head_dim": HEAD_DIM, "max_position_embeddings": CONTEXT, "rms_norm_eps": 1e-6, "rope_theta": 10000.0, "hidden_act": "silu",
        "tie_word_embeddings": False, "bos_token_id": 1, "eos_token_id": 2, "dtype": "float32",
    }  # fmt: skip
    (folder / "config.json").write_text(json.dumps(config))
    return folder


class DenseLlama:
    """The whole context at once, every time: no cache, no batch, no kernels."""

    def __init__(self, folder: Path) -> None:
        self.tensors = load_file(folder / "model.safetensors")

    def logits(self, ids: Sequence[int]) -> Tensor:
        """[len(ids), VOCAB]"""
        w, length = self.tensors, len(ids)
        hidden = w["model.embed_tokens.weight"][list(ids)]
        mask = torch.ones(length, length).tril().bool()
        for i in range(LAYERS):
            at = f"model.layers.{i}."
            x = self._norm(hidden, w[f"{at}input_layernorm.weight"])
            q = self._rotate((x @ w[f"{at}self_attn.q_proj.weight"].T).view(length, HEADS, HEAD_DIM))
            k = self._rotate((x @ w[f"{at}self_attn.k_proj.weight"].T).view(length, KV_HEADS, HEAD_DIM))
            v = (x @ w[f"{at}self_attn.v_proj.weight"].T).view(length, KV_HEADS, HEAD_DIM)
            k, v = (t.repeat_interleave(HEADS // KV_HEADS, dim=1).transpose(0, 1) for t in (k, v))
            scores = (q.transpose(0, 1) @ k.transpose(1, 2) * HEAD_DIM**-0.5).masked_fill(~mask, float("-inf"))
            mixed = (scores.softmax(dim=-1) @ v).transpose(0, 1).reshape(length, -1)
            hidden = hidden + mixed @ w[f"{at}self_attn.o_proj.weight"].T
            x = self._norm(hidden, w[f"{at}post_attention_layernorm.weight"])
            gated = F.silu(x @ w[f"{at}mlp.gate_proj.weight"].T) * (x @ w[f"{at}mlp.up_proj.weight"].T)
            hidden = hidden + gated @ w[f"{at}mlp.down_proj.weight"].T
        return F.linear(self._norm(hidden, w["model.norm.weight"]), w["lm_head.weight"])

    def greedy(self, prompt: Sequence[int], count: int, language: Language = lambda outputs: range(VOCAB)) -> list[int]:
        ids = list(prompt)
        for _ in range(count):
            logits = self.logits(ids)[-1]
            ids.append(max(sorted(language(ids[len(prompt) :])), key=lambda token: float(logits[token])))
        return ids[len(prompt) :]

    @staticmethod
    def _norm(x: Tensor, weight: Tensor) -> Tensor:
        return x.mul((x.pow(2).mean(-1, keepdim=True) + 1e-6).rsqrt()).mul(weight)

    @staticmethod
    def _rotate(x: Tensor) -> Tensor:
        half = HEAD_DIM // 2
        angle = torch.arange(len(x))[:, None] * 10000.0 ** (-torch.arange(half) / half)
        cos, sin = angle.cos()[:, None], angle.sin()[:, None]
        a, b = x[..., :half], x[..., half:]
        return torch.cat((a * cos - b * sin, b * cos + a * sin), dim=-1)


def load_decoder(folder: Path, *, enable_lora: bool = False) -> DecoderModel:
    return load_model(
        folder, backend=load_backend("reference"), dtype=torch.float32, device=CPU, load_format="auto", seed=0, max_model_len=None,
        enable_lora=enable_lora,
    ).model  # fmt: skip


ADAPTER_RANK = 3


def random_adapter(decoder: DecoderModel, seed: int) -> PackedAdapter:
    """Of every linear of a decoder loaded for adapters, and large enough to change most tokens."""
    assert decoder.adapters is not None
    generator = torch.Generator().manual_seed(seed)

    def update(in_features: int, part: AdaptedPart) -> LowRankUpdate:
        down, up = (torch.randn(shape, generator=generator) for shape in ((ADAPTER_RANK, in_features), (part.rows, ADAPTER_RANK)))
        return LowRankUpdate(down=down, up=up, scale=2 / in_features, first_row=part.first_row)

    linears = [[update(linear.in_features, part) for part in linear.parts_of_output] for linear in decoder.adapters.linears]
    return decoder.adapters.kernels.pack(linears)


def adapted(planner: Planner, place_of: dict[int, int], *rows: Row) -> Plan:
    """place_of: the place of each slot's adapter"""
    return replace(planner.plan(*rows), adapter_slots=array("i", [place_of[row[0]] for row in rows]))


class MakeRunner(Protocol):
    def __call__(
        self, decoder: DecoderModel, *, model: Any = None, num_blocks: int = 64, slots: int = 8, masks: MaskSource | None = None
    ) -> Any: ...


def make_runner(
    decoder: DecoderModel,
    *,
    model: Model | None = None,
    block_size: int = 4,
    num_blocks: int = 64,
    slots: int = 8,
    masks: MaskSource | None = None,
    resident: Callable[[], Resident] | None = None,
    drafter: Callable[[SlotState, Sampler], Drafter] | None = None,
) -> ModelRunner:
    kv = allocate_kv(decoder.kv_shapes, decoder.group_of, (num_blocks,), block_size, torch.float32, CPU)
    return ModelRunner(
        model or decoder, kv, max_num_seqs=slots, max_model_len=CONTEXT, draw=draw, eos_token_ids=(2,), masks=masks, resident=resident,
        drafter=drafter,
    )  # fmt: skip


@dataclass
class Planner:
    """Writes plans the way a scheduler would: hands out blocks, sends changes once."""

    block_size: int = 4
    next_block: int = 1
    step_id: int = 0
    blocks: dict[int, list[int]] = field(default_factory=dict)
    grammars: dict[int, Grammar] = field(default_factory=dict)
    _started: list[Started] = field(default_factory=list)
    _ended: list[int] = field(default_factory=list)
    _tables: list[tuple[int, int, int]] = field(default_factory=list)
    _moves: list[tuple[int, int]] = field(default_factory=list)

    def start(
        self,
        slot: int,
        prompt: Sequence[int],
        params: SamplingParams = GREEDY,
        *,
        outputs: Sequence[int] = (),
        index: int = 0,
        grammar: Grammar | None = None,
    ) -> None:
        self._started.append(Started(SlotId(slot), array("i", [*prompt, *outputs]), len(prompt), params, index, grammar))
        self.grammars.pop(slot, None)
        if grammar is not None:
            self.grammars[slot] = grammar
        self.blocks[slot] = []

    def end(self, slot: int) -> None:
        self._ended.append(slot)

    def copy_from(self, source_slot: int, slot: int, index: int) -> None:
        """The slot's next block becomes a copy of another slot's block `index`."""
        self._take(slot)
        self._moves.append((self.blocks[source_slot][index], self.blocks[slot][-1]))

    def share(self, source_slot: int, slot: int, count: int) -> None:
        """The slot's first `count` blocks are those of another slot."""
        for block in self.blocks[source_slot][:count]:
            self._tables.append((slot, len(self.blocks[slot]), block))
            self.blocks[slot].append(block)

    def _take(self, slot: int) -> None:
        self._tables.append((slot, len(self.blocks[slot]), self.next_block))
        self.blocks[slot].append(self.next_block)
        self.next_block += 1

    def plan(self, *rows: Row) -> Plan:
        for slot, start, count, _ in rows:
            while len(self.blocks[slot]) * self.block_size < start + count:
                self._take(slot)
        plan = self._freeze(rows)
        self._started, self._ended, self._tables, self._moves = [], [], [], []
        return plan

    def _freeze(self, rows: Sequence[Row]) -> Plan:
        self.step_id += 1
        columns = [array("i", [row[i] for row in rows]) for i in range(4)]
        return Plan(
            step_id=self.step_id,
            slots=columns[0],
            starts=columns[1],
            counts=columns[2],
            samples=columns[3],
            adapter_slots=array("i", [0] * len(rows)),
            mask_slots=array("i", [row[0] if row[0] in self.grammars else -1 for row in rows]),
            table_groups=array("i", [0] * len(self._tables)),
            table_slots=array("i", [entry[0] for entry in self._tables]),
            table_indices=array("i", [entry[1] for entry in self._tables]),
            table_blocks=array("i", [entry[2] for entry in self._tables]),
            move_kinds=array("i", [0] * len(self._moves)),
            move_ids=array("i", [SYNCHRONOUS] * len(self._moves)),
            move_groups=array("i", [0] * len(self._moves)),
            move_sources=array("i", [move[0] for move in self._moves]),
            move_targets=array("i", [move[1] for move in self._moves]),
            started=tuple(self._started),
            ended=array("i", self._ended),
        )


def row_tokens(result: Result) -> list[list[int]]:
    tokens, position = [], 0
    for count in result.token_counts:
        tokens.append(list(result.token_ids[position : position + count]))
        position += count
    return tokens
