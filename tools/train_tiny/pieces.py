"""Ties the embeddings of a piece with and without the space before it.

` teal` and `teal` are different tokens, and most of a vocabulary this small are such pairs. Left alone, a model learns for
every pair by itself that one copies to the other, and a rare piece has not been seen often enough. So the two share
their embedding but for one vector that stands for the space, the same for all pairs: what is learned of frequent words
holds for all. Training keeps to it by a projection after every step; the exported files know nothing of it.
"""

from __future__ import annotations

import numpy as np
import torch
from numpy.typing import NDArray
from tokenizers import Tokenizer
from torch import Tensor

from tools.train_tiny.tokenizer import SPACE


class SharedPieces:
    """The pairs of one embedding [V, D]; `hold` brings them together again after an optimizer step."""

    @torch.no_grad()
    def __init__(self, embed: Tensor, tokenizer: Tokenizer, counts: NDArray[np.int64]) -> None:
        """counts [V] says how often a token occurs: the more frequent one of a pair keeps its embedding, the other one follows."""
        ids = tokenizer.get_vocab()
        pairs = [(ids[token], at) for spaced, at in ids.items() if (token := spaced.removeprefix(SPACE)) != spaced and token in ids]
        self._embed = embed
        self._bare, self._spaced = torch.tensor(pairs, device=embed.device).T
        seen = torch.from_numpy(counts).to(embed.device)[torch.stack((self._bare, self._spaced))]
        weight = seen.amin(0).float()
        difference = embed[self._spaced] - embed[self._bare]
        space = (weight @ difference / weight.sum())[None]
        keeps_bare = (seen[0] > seen[1])[:, None]
        self._write(torch.where(keeps_bare, embed[self._bare], embed[self._spaced] - space), space)

    @torch.no_grad()
    def hold(self) -> None:
        bare, spaced = self._embed[self._bare], self._embed[self._spaced]
        space = (spaced - bare).mean(0, keepdim=True)
        self._write((bare + spaced - space) / 2, space)

    def _write(self, pieces: Tensor, space: Tensor) -> None:
        self._embed[self._bare] = pieces
        self._embed[self._spaced] = pieces + space
