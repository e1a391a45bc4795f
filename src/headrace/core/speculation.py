"""Names how drafts are made (docs/speculation.md)."""

from __future__ import annotations

from dataclasses import dataclass

NGRAM, SUFFIX, DRAFT_MODEL = "ngram", "suffix", "draft_model"
SPECULATIVE_METHODS = (NGRAM, SUFFIX, DRAFT_MODEL)

MAX_SPECULATIVE_TOKENS = 16


@dataclass(frozen=True, slots=True, kw_only=True)
class SpeculativeConfig:
    """
    num_speculative_tokens   most tokens drafted to follow a token, 1 .. MAX_SPECULATIVE_TOKENS
    prompt_lookup_min, prompt_lookup_max   ngram: how many of the last tokens are looked for, the longest first
    model                    draft_model: the folder of a model with the same tokenizer, or the name of a bundled one
    """

    method: str
    num_speculative_tokens: int = 5
    prompt_lookup_min: int = 3
    prompt_lookup_max: int = 5
    model: str = ""
