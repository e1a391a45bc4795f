"""Provides the bundled model's vocabulary as grammars see it, and a source of matchers without vetting or cache."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
import pytest

from headrace.bundled import bundled_path
from headrace.core.grammar import Grammar, GrammarKind
from headrace.engine.grammar import vetting_host
from headrace.engine.grammar.compiling import GrammarVocabulary, TokenTrie, compile_grammar
from headrace.text.tokenizer import Tokenizer

if TYPE_CHECKING:
    from llguidance import LLMatcher

TINY = bundled_path("headrace-tiny") or Path()
VOCAB = 2048
EOS = (2, 0)
PERSON = (
    '{"type":"object","properties":{"name":{"type":"string"},"age":{"type":"integer"},"tags":{"type":"array","items":{"enum":["a","bc"]}}},'
    '"required":["name","age"],"additionalProperties":false}'
)


@cache
def vocabulary() -> GrammarVocabulary:
    return GrammarVocabulary.load(TINY, VOCAB, EOS)


@cache
def trie() -> TokenTrie:
    return TokenTrie(vocabulary())


@cache
def tokenizer() -> Tokenizer:
    return Tokenizer.load(TINY)


def encode(text: str) -> list[int]:
    return tokenizer().encode(text, add_special_tokens=False)


def schema(source: str) -> Grammar:
    return Grammar(GrammarKind.JSON_SCHEMA, source)


def regex(source: str) -> Grammar:
    return Grammar(GrammarKind.REGEX, source)


def lark(source: str) -> Grammar:
    return Grammar(GrammarKind.LARK, source)


def compiled(grammar: Grammar) -> LLMatcher:
    return compile_grammar(trie(), grammar)


def matches(grammar: Grammar, text: str) -> bool:
    matcher, token_ids = compile_grammar(trie(), grammar), encode(text)
    return bool(matcher.try_consume_tokens(token_ids) == len(token_ids) and matcher.is_accepting())


def mask_of(matcher: LLMatcher) -> np.ndarray[tuple[int], np.dtype[np.bool_]]:
    """[V] which tokens the mask allows."""
    bits = np.unpackbits(np.frombuffer(matcher.compute_bitmask(), dtype=np.uint8), bitorder="little")
    return bits[:VOCAB].astype(np.bool_)


class CompilingSource:
    """Compiles whatever is asked for. num_renewed: templates that were compiled anew after a shared lexer was full."""

    def __init__(self) -> None:
        self.num_words = trie().num_words
        self.num_renewed = 0
        self._templates: dict[Grammar, LLMatcher] = {}

    def template(self, grammar: Grammar) -> LLMatcher:
        if grammar not in self._templates:
            self._templates[grammar] = compile_grammar(trie(), grammar)
        return self._templates[grammar]

    def renewed(self, grammar: Grammar) -> LLMatcher:
        self._templates[grammar] = self.unshared(grammar)
        return self._templates[grammar]

    def unshared(self, grammar: Grammar) -> LLMatcher:
        self.num_renewed += 1
        return compile_grammar(trie(), grammar)


class VetterHere:
    """Vets in this process, where a hostile grammar would have no bounds."""

    def __init__(self, folder: Path, vocab_size: int, eos_token_ids: tuple[int, ...]) -> None:
        self._model = folder, vocab_size, eos_token_ids

    def vocabulary(self) -> GrammarVocabulary:
        return _vocabulary_of(*self._model)

    def vet(self, grammar: Grammar) -> int:
        return vetting_host.vet(_trie_of(*self._model), grammar)

    def close(self) -> None:
        """There is no process to end."""


@cache
def _vocabulary_of(folder: Path, vocab_size: int, eos_token_ids: tuple[int, ...]) -> GrammarVocabulary:
    return GrammarVocabulary.load(folder, vocab_size, eos_token_ids)


@cache
def _trie_of(folder: Path, vocab_size: int, eos_token_ids: tuple[int, ...]) -> TokenTrie:
    return TokenTrie(_vocabulary_of(folder, vocab_size, eos_token_ids))


@contextmanager
def vetting_here() -> Iterator[None]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("headrace.engine.grammar.preparer.GrammarVetter", VetterHere)
        yield
