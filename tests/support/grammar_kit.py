"""The bundled model's vocabulary as grammars see it, and a source of matchers without vetting or cache."""

from __future__ import annotations

from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from headrace.bundled import bundled_path
from headrace.core.grammar import Grammar, GrammarKind
from headrace.engine.grammar.compiling import compile_grammar
from headrace.engine.grammar.sources import check_source
from headrace.engine.grammar.vocabulary import GrammarVocabulary, TokenTrie
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
    """Checked and compiled, as vetting does. Raises InvalidRequest."""
    check_source(grammar)
    return compile_grammar(trie(), grammar)


def matches(grammar: Grammar, text: str) -> bool:
    """Whether the text is taken token by token, and is complete."""
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
