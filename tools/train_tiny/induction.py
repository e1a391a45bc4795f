"""Writes an induction head into a model before (or early in) training.

Copying, JSON extraction, tool arguments and recall all rest on one circuit: a head that finds the earlier place of the
current token and reads what followed (Olsson et al. 2022). A small model on a small budget spends most of it waiting
for that circuit to appear. So one key/value head of the first layer is set to look at the previous token, and one of the
second layer to compare the current token with those previous tokens. Left alone, the first few hundred steps of training
at full learning rate wipe them out again, so they are held as written until the rest of the model has learned to use
them; then training refines them as it likes.

How: all embeddings get the same component along one direction, on which the previous-token head forms its constant
query and key; rotary position embedding turns that into "one position back" (high frequencies). Token codes are the
leading principal components of the embedding; they are compared on the low frequencies, which hardly turn.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from tools.train_tiny.model import Block, TinyLlama

HIGH = slice(0, 5)  # frequency pairs fast enough to tell neighbours apart
NUM_LOW = 8  # slowest pairs: less than half a radian over 50 tokens


@dataclass(frozen=True, slots=True)
class Gains:
    """Strengths relative to the size of the residual stream; found by trying on random repeated sequences."""

    constant: float = 0.3
    previous: float = 3.0
    write: float = 1.2
    match: float = 4.0
    copy: float = 6.0


@torch.no_grad()
def prewire(model: TinyLlama, gains: Gains = Gains()) -> None:
    """Overwrite the last key/value head (and its first query head) of layers 0 and 1.

    All other projections that write the residual stream start at zero: what they would add at random drowns the codes.
    """
    for block in model.blocks:
        assert isinstance(block, Block)
        block.o.weight.zero_()
        block.down.weight.zero_()
    embed = model.embed.weight
    size = float(embed.norm(dim=1).mean())
    directions = torch.linalg.eigh(embed.T @ embed)[1].T  # rows, smallest variance first
    constant, quiet, codes = directions[0], directions[1 : 1 + 2 * NUM_LOW], directions[-32:].flip(0)
    embed += torch.outer(gains.constant * size - embed @ constant, constant)
    spread = (embed @ codes.T).std(dim=0)
    whitened = codes / spread[:, None] * (size / embed.shape[1] ** 0.5)
    first, second = model.blocks[0], model.blocks[1]
    assert isinstance(first, Block)
    assert isinstance(second, Block)
    _previous_token_head(first, constant, whitened[: 2 * NUM_LOW], quiet, gains.previous, gains.write * size)
    _matching_head(second, whitened, quiet, codes, gains.match, gains.copy * size)


class WiredHeads:
    """The two heads as `prewire` wrote them; `hold` undoes what an optimizer step did to them."""

    def __init__(self, model: TinyLlama) -> None:
        blocks = [block for block in model.blocks[:2] if isinstance(block, Block)]
        self._views = [view for block in blocks for view in _head(block)]
        self._kept = [view.detach().clone() for view in self._views]

    @torch.no_grad()
    def hold(self) -> None:
        for view, kept in zip(self._views, self._kept, strict=True):
            view.copy_(kept)


def _previous_token_head(block: Block, constant: Tensor, codes: Tensor, quiet: Tensor, strength: float, write: float) -> None:
    """Query and key constant, one position apart; the value is the code of the token, written to the quiet directions."""
    q, k, v, o = _head(block)
    half = block.config.head_dim // 2
    frequencies = block.config.rope_theta ** (-torch.arange(half) / half)[HIGH]
    q.zero_()
    k.zero_()
    q[HIGH] = strength * torch.outer(frequencies.cos(), constant)
    q[half:][HIGH] = -strength * torch.outer(frequencies.sin(), constant)
    k[HIGH] = strength * constant
    v.zero_()
    v[: len(codes)] = codes
    o.zero_()
    o[:, : len(codes)] = write * quiet.T / len(codes) ** 0.5
    _undo_norm(block, q, k, v)


def _matching_head(block: Block, whitened: Tensor, quiet: Tensor, codes: Tensor, match: float, copy: float) -> None:
    """The query is the current token's code, the key the previous token's code; the value is the token itself."""
    q, k, v, o = _head(block)
    half = block.config.head_dim // 2
    low = torch.cat((torch.arange(half - NUM_LOW, half), torch.arange(2 * half - NUM_LOW, 2 * half)))
    q.zero_()
    k.zero_()
    q[low] = match * whitened[: 2 * NUM_LOW]
    k[low] = match * quiet
    v.copy_(whitened)
    o.copy_(copy * codes.T / len(codes) ** 0.5)
    _undo_norm(block, q, k, v)


def _head(block: Block) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Views of the rows of query, key, value and the columns of the output of one head."""
    c = block.config
    width, size, last = c.num_heads * c.head_dim, c.head_dim, c.num_kv_heads - 1
    query = last * (c.num_heads // c.num_kv_heads)
    rows = block.qkv.weight
    key = width + last * size
    value = key + c.num_kv_heads * size
    return (
        rows[query * size : (query + 1) * size],
        rows[key : key + size],
        rows[value : value + size],
        block.o.weight[:, query * size : (query + 1) * size],
    )


def _undo_norm(block: Block, *matrices: Tensor) -> None:
    """The norm's learned scale comes before the matrices; they were made for an input without it."""
    for matrix in matrices:
        matrix.div_(block.attn_norm)
