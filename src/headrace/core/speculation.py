"""Options of speculation, and the names of its methods (docs/speculation.md)."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import ClassVar

from headrace.core.errors import ConfigError
from headrace.core.option import check_options, option, required
from headrace.core.vllm_options import SPECULATIVE_KEYS, SPECULATIVE_METHOD_REMEDIES

NGRAM, SUFFIX, DRAFT_MODEL = "ngram", "suffix", "draft_model"
SPECULATIVE_METHODS = (NGRAM, SUFFIX, DRAFT_MODEL)

MAX_SPECULATIVE_TOKENS = 16
MAX_LOOKUP_TOKENS = 64


@dataclass(frozen=True, slots=True, kw_only=True)
class SpeculativeConfig:
    """vLLM's keys. Those that it has and this class has not are in `INSTEAD`, with why. vLLM finds out a method that is not given."""

    INSTEAD: ClassVar[Mapping[str, str]] = SPECULATIVE_KEYS
    IF_MISSING: ClassVar[Mapping[str, str]] = {
        "method": f"Give one of {', '.join(SPECULATIVE_METHODS)}; with `model`, the folder of a smaller model, it is {DRAFT_MODEL}."
    }

    method: str = required(
        "`ngram` copies what followed the last tokens where they occur earlier in the sequence, `suffix` what followed the longest such "
        "match, `draft_model` runs a smaller model. The flag has vLLM's JSON: an object of these keys.",
        one_of=SPECULATIVE_METHODS,
    )
    num_speculative_tokens: int = option(
        5,
        "Most tokens drafted to follow a token; how many are, adapts by itself.",
        low=1,
        high=MAX_SPECULATIVE_TOKENS,
    )
    prompt_lookup_min: int | None = option(
        None,
        "`ngram`: fewest of the last tokens that must occur earlier. Less drafts more often, and worse.",
        shown="3, or `prompt_lookup_max` if that is less",
        low=1,
        high=MAX_LOOKUP_TOKENS,
    )
    prompt_lookup_max: int | None = option(
        None,
        "`ngram`: how many of the last tokens are looked for first.",
        shown="5, or `prompt_lookup_min` if that is more",
        low=1,
        high=MAX_LOOKUP_TOKENS,
    )
    model: str = option("", "`draft_model`: the folder of a smaller model with the same tokenizer, or a bundled one (`headrace-draft`).")

    @property
    def prompt_lookup(self) -> tuple[int, int]:
        """(fewest, most) of the last tokens that `ngram` looks for."""
        fewest, most = self.prompt_lookup_min, self.prompt_lookup_max
        return min(3, most or 3) if fewest is None else fewest, max(5, fewest or 5) if most is None else most

    def check(self, where: str) -> None:
        """Raises ConfigError naming the key, below `where`."""
        if (remedy := SPECULATIVE_METHOD_REMEDIES.get(self.method)) is not None:
            raise ConfigError(f"{where}.method", f"{self.method!r} is not supported", remedy)
        check_options(self, where)
        for name, method in (("prompt_lookup_min", NGRAM), ("prompt_lookup_max", NGRAM), ("model", DRAFT_MODEL)):
            if getattr(self, name) and self.method != method:
                raise ConfigError(f"{where}.{name}", f"is for the method {method}, and this one is {self.method}", "Leave it out.")
        if self.method == DRAFT_MODEL and not self.model:
            remedy = "Give the folder of a smaller model with the same tokenizer; headrace-draft is one for headrace-tiny."
            raise ConfigError(f"{where}.model", "is missing", remedy)
        fewest, most = self.prompt_lookup
        if fewest > most:
            raise ConfigError(f"{where}.prompt_lookup_min", f"{fewest} is more than prompt_lookup_max ({most})")
