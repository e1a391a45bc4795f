"""Draws documents byte by byte from a compiled grammar: whatever its masks allow may be written."""

from __future__ import annotations

import random
from collections.abc import Iterator
from functools import cache

from headrace.core.grammar import Grammar
from headrace.engine.grammar.compiling import GrammarVocabulary, TokenTrie, compile_grammar

LONG = 60

MAX_BYTES = 4_000
END = 256


@cache
def byte_trie() -> TokenTrie:
    return TokenTrie(GrammarVocabulary([*(bytes([byte]) for byte in range(256)), b"<end>"], frozenset({END}), (END,)))


def documents(grammar: Grammar, count: int, *, seed: int = 0) -> Iterator[str]:
    """Documents of a grammar. Raises InvalidRequest where it is refused, AssertionError where nothing can follow."""
    template = compile_grammar(byte_trie(), grammar)
    rng = random.Random(seed)
    for _ in range(count):
        matcher, written, in_string = template.deep_copy(), bytearray(), False
        while not matcher.is_stopped():
            mask = matcher.compute_bitmask()
            assert not matcher.is_error(), matcher.get_error()
            allowed = [token for token in range(END + 1) if mask[token >> 3] >> (token & 7) & 1]
            assert allowed, f"nothing can follow {written!r}"
            assert len(written) < MAX_BYTES, f"no end after {written[:200]!r}"
            token = _chosen(rng, allowed, len(written), in_string=in_string)
            matcher.consume_token(token)
            if token != END:
                in_string ^= token == ord('"') and _is_unescaped(written)
                written.append(token)
        yield written.decode()


def is_taken(grammar: Grammar, text: str) -> bool:
    matcher, given = compile_grammar(byte_trie(), grammar), list(text.encode())
    return bool(matcher.try_consume_tokens(given) == len(given) and matcher.is_accepting())


def _is_unescaped(written: bytearray) -> bool:
    return (len(written) - len(written.rstrip(b"\\"))) % 2 == 0


_ENDING = [END, *b"}],n"]


def _chosen(rng: random.Random, allowed: list[int], num_written: int, *, in_string: bool) -> int:
    """Mostly plain characters, now and then any; what ends strings, objects and lists more often, and always in a long document."""
    ends = [ord('"')] if in_string else _ENDING
    if num_written > LONG or rng.random() < 0.25:
        for token in ends:
            if token in allowed:
                return token
    plain = [token for token in allowed if 0x20 < token < 0x7F and token != ord("\\")]
    return rng.choice(plain if plain and rng.random() < 0.9 else allowed)
