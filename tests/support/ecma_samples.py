"""Draws patterns and schemas at random, documents that a grammar allows, and the judge of both: `jsonschema` with an engine of ECMAScript's
regular expressions.
"""

from __future__ import annotations

import json
import random
import re
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass, field
from functools import cache
from typing import Any

import regress
from jsonschema import Draft202012Validator, ValidationError, validators
from sampled_documents import END, byte_trie

from headrace.core.errors import InvalidRequest
from headrace.core.grammar import Grammar, GrammarKind
from headrace.engine.grammar.compiling import compile_grammar

LONG = 40
MAX_BYTES = 400
"""Bytes after which a document is given up. Most end before: strings and lists are short."""

ATOMS = [
    *("a", "b", "x", "-", ",", '"', "'", "/", "\u00e9", "\U0001f600", "]", "}", "&", "~", "0", " "),
    *(r"\d", r"\w", r"\s", r"\D", r"\W", r"\S", ".", r"\\", r"\"", r"\/", r"\-", r"\.", r"\n", r"\t", r"\x41", r"\u0062", r"\u{63}"),
    *(r"\uD83D\uDE00", r"\cJ", r"\[", r"\{", r"\p{L}", r"\P{L}", r"\p{Lu}", r"\p{Nd}", "(?s:.)", "(?i:k)", "(?i:[^a-k])", "[^]"),
]
MEMBERS = [
    *("a", "b", "a-f", "0-9", '"', r"\\", r"\]", "[", "^", "-", "&", "&&", "~~", "\u00e9", "\U0001f600", "[:alpha:", " ", "/", "."),
    *(
        r"\d",
        r"\w",
        r"\s",
        r"\D",
        r"\W",
        r"\S",
        r"\n",
        r"\b",
        r"\x00-\x1f",
        r"\u0000",
        r"\-",
        r"\uD83D\uDE00-\uD83D\uDE4F",
        r"\p{L}",
        r"\P{Lu}",
    ),
]
QUANTIFIERS = ["*", "+", "?", "*?", "??", "{2}", "{0,2}", "{1,}", "{1,3}?"]
TEXTS = [
    "",
    "a",
    "b",
    "ab",
    "x-a",
    '"',
    "\\",
    'a"b',
    "a\\b",
    "\n",
    "\t",
    "\b",
    "A",
    "K",
    "\u212a",
    "0",
    "9",
    "\u0665",
    "\u00e9",
    "\U0001f600",
]
TEXTS += ["&", "~", "[", "]", "a]", "}", "\u2028", "\u00a0", "\ufeff", "/", "--", ",x", "x,", "a,x,b", "aaaa", "0x41", "\u0001", "\u007f"]


def patterns(count: int, seed: int) -> Iterator[str]:
    """Patterns that the engine reads: with the flag u, or without it where that flag would not change what they mean."""
    rng = random.Random(seed)
    while count:
        found = _pattern_text(rng)
        with suppress(regress.RegressError):
            engine(found)
            count -= 1
            yield found


def _pattern_text(rng: random.Random) -> str:
    found = _branch(rng, 3)
    if rng.random() < 0.15:
        found = f"(?{rng.choice('=!')}{rng.choice(['', '.*', '[^]*'])}{_atom(rng, 0)}{rng.choice(['', '$'])}){found}"
    return f"{'^' * (rng.random() < 0.7)}{found}{'$' * (rng.random() < 0.7)}"


def _branch(rng: random.Random, depth: int) -> str:
    return "".join([_repeated(rng, depth) for _ in range(rng.randint(1, 3))])


def _repeated(rng: random.Random, depth: int) -> str:
    return _atom(rng, depth) + (rng.choice(QUANTIFIERS) if rng.random() < 0.35 else "")


def _atom(rng: random.Random, depth: int) -> str:
    kind = rng.random()
    if depth and kind < 0.2:
        branches = "|".join([_branch(rng, depth - 1) for _ in range(rng.randint(1, 3))])
        return f"{rng.choice(['(', '(?:', '(?<n>', '(?:^|', '($|'])}{branches})"
    if kind < 0.5:
        return f"[{rng.choice(['', '^'])}{''.join(rng.sample(MEMBERS, rng.randint(1, 4)))}]"
    return rng.choice(ATOMS)


def schemas(count: int, seed: int) -> Iterator[dict[str, Any]]:
    rng = random.Random(seed)
    for _ in range(count):
        yield _object(rng, 2)


def _object(rng: random.Random, depth: int) -> dict[str, Any]:
    names = rng.sample(["a", "b", "\u00e9", 'q"', "b\\", "n\n", "\U0001f600", "a b"], rng.randint(0, 3))
    found: dict[str, Any] = {"type": "object", "properties": {name: _value(rng, depth) for name in names}}
    found["required"] = [name for name in names if rng.random() < 0.6]
    if rng.random() < 0.4:
        found["patternProperties"] = {rng.choice(["^x", '^[^"]$', "^\\d+$", "[[a]]", "^[\\w-.]+$", "\\\\"]): _value(rng, depth)}
    elif rng.random() < 0.15:
        found = {"type": "object", "propertyNames": {"pattern": next(patterns(1, rng.randrange(1 << 30)))}, "maxProperties": 2}
    found["additionalProperties"] = rng.choice([False, False, True, {"type": "integer", "minimum": 0, "maximum": 9}, {"type": "null"}])
    return found


def _value(rng: random.Random, depth: int) -> dict[str, Any]:
    kind = rng.random()
    if depth and kind < 0.15:
        return _object(rng, depth - 1)
    if depth and kind < 0.25:
        return {"type": "array", "items": _value(rng, depth - 1), "maxItems": 2}
    if kind < 0.35:
        return {"enum": rng.sample(TEXTS[:-2], 3)}
    if kind < 0.45:
        return rng.choice([{"type": "boolean"}, {"type": "integer", "minimum": -5, "maximum": 99}, {"format": "date", "type": "string"}])
    low = rng.randrange(3)
    rules: dict[str, Any] = {"type": "string", "minLength": low, "maxLength": low + rng.randrange(6)}
    if kind < 0.85:
        rules["pattern"] = next(patterns(1, rng.randrange(1 << 30)))
    if rng.random() < 0.15:
        return {"allOf": [rules, {"pattern": next(patterns(1, rng.randrange(1 << 30)))}]}
    return rules


OF_THE_FLAG = re.compile(r"\\[pP]|\\u\{|\\u[dD][89a-fA-F]|[\U00010000-\U0010ffff]|\(\?i")
"""What the flag u gives another meaning. Without it, a set like [^a] takes half of a character beyond the first plane."""


@cache
def engine(pattern: str) -> regress.Regex:
    """The pattern with the flag u, or without it where that makes it an error. Raises regress.RegressError."""
    try:
        return regress.Regex(pattern, "u")
    except regress.RegressError:
        if OF_THE_FLAG.search(pattern):
            raise
        return regress.Regex(pattern)


def _found(pattern: str, text: str) -> bool:
    return engine(pattern).find(text) is not None


def _pattern(_: Any, rule: str, value: Any, schema: Any) -> Iterator[ValidationError]:
    if isinstance(value, str) and not _found(rule, value):
        yield ValidationError(f"{value!r} does not match {rule!r}")


def _pattern_properties(validator: Any, rules: dict[str, Any], value: Any, schema: Any) -> Iterator[ValidationError]:
    for pattern, rule in rules.items():
        for name, each in value.items() if isinstance(value, dict) else ():
            if _found(pattern, name):
                yield from validator.descend(each, rule, path=name)


def _additional_properties(validator: Any, rule: Any, value: Any, schema: Any) -> Iterator[ValidationError]:
    for name, each in value.items() if isinstance(value, dict) else ():
        if name not in schema.get("properties", {}) and not any(_found(pattern, name) for pattern in schema.get("patternProperties", {})):
            yield from validator.descend(each, rule, path=name)


Judge: Any = validators.extend(  # type: ignore[no-untyped-call]
    Draft202012Validator,
    {"pattern": _pattern, "patternProperties": _pattern_properties, "additionalProperties": _additional_properties},
)


@dataclass
class Tally:
    """What became of the schemas. disagreements: (schema, document, what is wrong)"""

    num_refused: int = 0
    num_compiled: int = 0
    num_judged: int = 0
    num_cut: int = 0
    num_texts: int = 0
    reasons: list[str] = field(default_factory=list)
    disagreements: list[tuple[dict[str, Any], str, str]] = field(default_factory=list)

    def add(self, schema: dict[str, Any], *, seed: int, num_documents: int = 6) -> None:
        """Compile a schema, draw documents of it, and judge them. Texts that a pattern alone takes are offered, too."""
        grammar = Grammar(GrammarKind.JSON_SCHEMA, json.dumps(schema))
        try:
            template = compile_grammar(byte_trie(), grammar)
        except InvalidRequest as error:
            self.num_refused += 1
            self.reasons.append(str(error))
            return
        self.num_compiled += 1
        rng = random.Random(seed)
        judge = Judge(schema, format_checker=Draft202012Validator.FORMAT_CHECKER)
        for _ in range(num_documents):
            text = _drawn(template, rng)
            self.num_cut += text is None
            if text is not None:
                self.num_judged += 1
                self._judge(schema, judge, text)
        if schema.keys() == {"type", "pattern", "maxLength"}:
            template = compile_grammar(byte_trie(), grammar)
            for value in TEXTS[:-2]:
                self._offer(schema, judge, template, value)

    def _judge(self, schema: dict[str, Any], judge: Any, text: str) -> None:
        try:
            value = json.loads(text)
        except ValueError as error:
            self.disagreements.append((schema, text, f"is no JSON: {error}"))
            return
        if not judge.is_valid(value):
            self.disagreements.append((schema, text, "does not validate"))

    def _offer(self, schema: dict[str, Any], judge: Any, template: Any, value: str) -> None:
        matcher, given = template.deep_copy(), list(json.dumps(value, ensure_ascii=False).encode())
        is_taken = matcher.try_consume_tokens(given) == len(given) and matcher.is_accepting()
        if matcher.is_error():  # as in `_drawn`
            self.num_cut += 1
            return
        self.num_texts += 1
        if is_taken != judge.is_valid(value):
            self.disagreements.append((schema, value, "is taken" if is_taken else "is not taken"))


def _drawn(template: Any, rng: random.Random) -> str | None:
    """A document drawn byte by byte from what the masks allow; None where it gets too long, or its lexer full."""
    matcher, written = template.deep_copy(), bytearray()
    while not matcher.is_stopped():
        mask = matcher.compute_bitmask()
        if matcher.is_error():  # its lexer is full: such a sequence ends with an error, or begins a new lexer
            return None
        allowed = [token for token in range(END + 1) if mask[token >> 3] >> (token & 7) & 1]
        assert allowed, f"nothing can follow {bytes(written)!r}"
        if len(written) >= MAX_BYTES:
            return None
        token = _chosen(rng, allowed, is_long=len(written) > LONG)
        matcher.consume_token(token)
        if token != END:
            written.append(token)
    return written.decode()


_LIKED = frozenset(b'"\\ux[]{}&-,:^~')


def _chosen(rng: random.Random, allowed: list[int], *, is_long: bool) -> int:
    """Mostly characters that mean something in JSON or in expressions, now and then any byte; what ends a document in a long one."""
    ends = [token for token in (END, *b'"}]') if token in allowed]
    if ends and (is_long or rng.random() < 0.15):
        return int(ends[0])
    liked = [token for token in allowed if token in _LIKED]
    if liked and rng.random() < 0.5:
        return int(rng.choice(liked))
    plain = [token for token in allowed if 0x20 <= token < 0x7F]
    return int(rng.choice(plain if plain and rng.random() < 0.8 else allowed))
