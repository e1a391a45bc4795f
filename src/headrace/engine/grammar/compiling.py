"""Compiles a grammar over a model's vocabulary, or says in a client's words why it cannot be compiled.

The bytes of tokens are those of the project's own detokenizer (`text.tokenizer`), so what a grammar allows is what the client reads.
"""

from __future__ import annotations

import re
import struct
from dataclasses import dataclass
from itertools import accumulate, pairwise
from pathlib import Path
from typing import TYPE_CHECKING

from headrace.core.errors import CheckpointError, InvalidRequest
from headrace.core.grammar import Grammar, GrammarKind
from headrace.engine.grammar.limits import parser_limits
from headrace.engine.grammar.sources import llguidance_source

if TYPE_CHECKING:
    from llguidance import LLMatcher, LLTokenizer

_HEADER = struct.Struct("<III")


@dataclass(frozen=True, slots=True)
class GrammarVocabulary:
    """tokens: empty for an id without a token; eos_token_ids: what may follow a complete output"""

    tokens: list[bytes]
    special_ids: frozenset[int]
    eos_token_ids: tuple[int, ...]

    @classmethod
    def load(cls, folder: str | Path, vocab_size: int, eos_token_ids: tuple[int, ...]) -> GrammarVocabulary:
        """Raises CheckpointError when tokenizer.json is missing or of an unsupported kind.

        Holds the GIL for long if the vocabulary is large: an engine calls this in another process.
        """
        from headrace.text.tokenizer import Tokenizer

        tokenizer = Tokenizer.load(folder)
        special_ids = {i for i in tokenizer.special_ids if i < vocab_size} | set(eos_token_ids)
        return cls([tokenizer.token_bytes(i) for i in range(vocab_size)], frozenset(special_ids), eos_token_ids)

    def packed(self) -> bytes:
        """Three counts, 32-bit lengths, special ids, end ids, all tokens' bytes."""
        specials = sorted(self.special_ids)
        head = _HEADER.pack(len(self.tokens), len(specials), len(self.eos_token_ids))
        numbers = [*map(len, self.tokens), *specials, *self.eos_token_ids]
        return b"".join([head, struct.pack(f"<{len(numbers)}I", *numbers), *self.tokens])

    @classmethod
    def unpacked(cls, data: bytes) -> GrammarVocabulary:
        num_tokens, num_special, num_eos = _HEADER.unpack_from(data)
        numbers = struct.unpack_from(f"<{num_tokens + num_special + num_eos}I", data, _HEADER.size)
        ends = accumulate(numbers[:num_tokens], initial=_HEADER.size + 4 * len(numbers))
        tokens = [data[begin:end] for begin, end in pairwise(ends)]
        return cls(tokens, frozenset(numbers[num_tokens : num_tokens + num_special]), numbers[num_tokens + num_special :])


class TokenTrie:
    """num_words: 32-bit words of a mask"""

    def __init__(self, vocabulary: GrammarVocabulary) -> None:
        """Raises CheckpointError."""
        from llguidance import LLTokenizer, TokenizerWrapper

        self.vocab_size = len(vocabulary.tokens)
        self.num_words = -(-self.vocab_size // 32)
        self.eos_token_ids = vocabulary.eos_token_ids
        self.control_ids = {vocabulary.tokens[i].decode("utf-8", "replace"): i for i in sorted(vocabulary.special_ids)}
        try:
            plain = LLTokenizer(
                TokenizerWrapper(_WrappedVocabulary(vocabulary)),
                n_vocab=self.vocab_size,
                eos_token=list(vocabulary.eos_token_ids),
                slices=[],
            )
            self.tokenizer: LLTokenizer = plain.with_slices(LLTokenizer.general_slices())
        except ValueError as error:
            raise CheckpointError("tokenizer.json", f"cannot be used for grammars ({str(error)[:120]})") from error


class _WrappedVocabulary:
    """Masks let the model choose how it spells a text: nothing is tokenized."""

    bos_token_id = None

    def __init__(self, vocabulary: GrammarVocabulary) -> None:
        self.tokens = vocabulary.tokens
        self.eos_token_id = vocabulary.eos_token_ids[0]
        self.special_token_ids = sorted(vocabulary.special_ids)

    def __call__(self, text: bytes) -> list[int]:
        return []


MAX_REASON_CHARS = 300

NAMES = {
    GrammarKind.JSON_SCHEMA: "a JSON schema",
    GrammarKind.REGEX: "a regular expression",
    GrammarKind.LARK: "a grammar",
}


NAME_EXCLUDED = ". Allow it in properties, propertyNames, patternProperties or additionalProperties."


def compile_grammar(trie: TokenTrie, grammar: Grammar) -> LLMatcher:
    """Copies of it match outputs of their own and share its lexer's states. Releases the GIL. Raises InvalidRequest."""
    from llguidance import LLMatcher

    matcher = LLMatcher(trie.tokenizer, llguidance_source(grammar, trie.control_ids), log_level=0, limits=parser_limits())
    if matcher.is_error():
        raise refusal(grammar, matcher.get_error())
    return matcher


def refusal(grammar: Grammar, reason: str) -> InvalidRequest:
    name = NAMES[grammar.kind]
    if grammar.kind is GrammarKind.REGEX:
        reason = _regex_reason(reason)
    elif embedded := re.search(r"failed to compile JSON schema: (.*?)(?=\n *\d+ \||\Z)", reason, re.DOTALL):
        name, reason = NAMES[GrammarKind.JSON_SCHEMA], embedded[1]
    remedy = NAME_EXCLUDED if reason.startswith("Unsatisfiable schema: required property") else ""
    return InvalidRequest("grammar", f"{name} that can be compiled", remedy=one_line(reason) + remedy)


def _regex_reason(reason: str) -> str:
    if match := re.search(r"^error: (.+)$", reason, re.MULTILINE):
        return f"{match[1][:1].upper()}{match[1][1:]}."
    _, _, rest = reason.rpartition("(in regex): ")
    return rest.splitlines()[0] if rest else reason


def one_line(reason: str) -> str:
    text = " ".join(reason.replace("<non-verbose/>", "").split())
    return text if len(text) <= MAX_REASON_CHARS else text[: MAX_REASON_CHARS - 3] + "..."
