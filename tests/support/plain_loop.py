"""Computes the right tokens: one plain greedy loop in transformers, every choice confirmed by a forward over the whole context.

No cache, batch, scheduler or sampler of ours. Also the checkpoint most end-to-end tests use: a random Llama saved by transformers
beside a real byte-level tokenizer, with weights wide enough that its answers differ from prompt to prompt.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import text_kit
import torch
from torch import Tensor

from headrace.text.folder import TextModel

CONTEXT = 512


def save_random_llama(folder: Path, *, seed: int = 0) -> Path:
    """Two layers, GQA, random weights in float32, `text_kit`'s tokenizer and template; the vocabulary is the tokenizer's own."""
    from transformers import LlamaConfig, LlamaForCausalLM

    text_kit.save_byte_level(folder)
    vocab_size = _vocab_size(folder)
    torch.manual_seed(seed)
    config: Any = LlamaConfig(
        vocab_size=vocab_size,
        hidden_size=48,
        intermediate_size=96,
        num_hidden_layers=2,
        num_attention_heads=6,
        num_key_value_heads=2,
        max_position_embeddings=CONTEXT,
        rms_norm_eps=1e-5,
        initializer_range=0.25,
        tie_word_embeddings=False,
        bos_token_id=_token_id(folder, "<|begin|>"),
        eos_token_id=_token_id(folder, "<|im_end|>"),
    )
    LlamaForCausalLM(config).save_pretrained(folder)
    return folder


def _vocab_size(folder: Path) -> int:
    from tokenizers import Tokenizer

    return int(Tokenizer.from_file(str(folder / "tokenizer.json")).get_vocab_size(with_added_tokens=True))


def _token_id(folder: Path, token: str) -> int:
    from tokenizers import Tokenizer

    found = Tokenizer.from_file(str(folder / "tokenizer.json")).token_to_id(token)
    assert found is not None
    return int(found)


class PlainLoop:
    """transformers' own model of a folder. Answers are remembered: many tests ask for the same ones."""

    clear = 2e-5
    """Logits closer than this may change places with the order of a sum; the oracle refuses to judge such a token."""

    def __init__(self, folder: Path, *, dtype: torch.dtype = torch.float32) -> None:
        from tokenizers import Tokenizer
        from transformers import AutoModelForCausalLM

        self.folder = folder
        self.model = AutoModelForCausalLM.from_pretrained(folder, dtype=dtype, attn_implementation="eager").eval()
        self.tokenizer = Tokenizer.from_file(str(folder / "tokenizer.json"))
        self.eos_token_ids = _as_list(self.model.generation_config.eos_token_id)
        self._known: dict[tuple[int, ...], list[int]] = {}

    def logits(self, ids: Sequence[int]) -> Tensor:
        """[len(ids), vocabulary], float32."""
        with torch.no_grad():
            logits: Tensor = self.model(torch.tensor([list(ids)]), use_cache=False).logits[0].float()
        return logits

    def greedy(self, prompt: Sequence[int], count: int, *, ignore_eos: bool = True) -> list[int]:
        """The `count` tokens after the prompt; with ignore_eos False they end with the first end token.

        Raises: AssertionError where the model itself hardly knows which of two tokens comes next: such a prompt tests nothing.
        """
        known = self._known.get(tuple(prompt), [])
        if len(known) < count:
            known = self._known[tuple(prompt)] = self._run(list(prompt), count)
        answer = known[:count]
        if not ignore_eos:
            ends = [position for position, token_id in enumerate(answer) if token_id in self.eos_token_ids]
            answer = answer[: ends[0] + 1] if ends else answer
        return answer

    def clear_one(self, prompts: Sequence[Sequence[int]], count: int) -> Sequence[int]:
        for prompt in prompts:
            try:
                self.greedy(prompt, count)
            except AssertionError:
                continue
            return prompt
        raise AssertionError(f"no prompt has a clear answer of {count} tokens")

    def _run(self, prompt: list[int], count: int) -> list[int]:
        """transformers' own cache makes the loop quick; one forward over everything, without it, then confirms every choice."""
        with torch.no_grad():
            step = self.model(torch.tensor([prompt]), use_cache=True)
            answer = [int(step.logits[0, -1].argmax())]
            while len(answer) < count:
                step = self.model(torch.tensor([answer[-1:]]), past_key_values=step.past_key_values, use_cache=True)
                answer.append(int(step.logits[0, -1].argmax()))
        best = self.logits([*prompt, *answer[:-1]])[len(prompt) - 1 :].topk(2)
        assert best.indices[:, 0].tolist() == answer
        assert (best.values[:, 0] - best.values[:, 1]).min() > self.clear, f"no clear best token somewhere in the answer to {prompt}"
        return answer

    def text(self, token_ids: Sequence[int]) -> str:
        """As the `tokenizers` library spells a whole answer; control tokens left out."""
        spelled: str = self.tokenizer.decode(list(token_ids), skip_special_tokens=True)
        return spelled

    def encode(self, text: str) -> list[int]:
        ids: list[int] = self.tokenizer.encode(text).ids
        return ids


@dataclass(frozen=True)
class Checkpoint:
    """None of the prompts has a doubtful answer; some have common beginnings."""

    name: str
    folder: Path
    plain: PlainLoop
    text: TextModel
    prompts: tuple[tuple[int, ...], ...]


def _as_list(value: int | list[int] | None) -> list[int]:
    return [] if value is None else [value] if isinstance(value, int) else list(value)
