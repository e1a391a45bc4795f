"""Draws schemas, regular expressions and Lark grammars at random, each with a check that shares no code with the matcher under test.

A model that draws at random comes to the end of each: they are bounded, or recur only with brackets that have to be closed. A schema is
checked by the `jsonschema` package, an expression by `re`, and a Lark grammar by `Pattern.ends`: it is rendered from a tree of patterns,
and the same tree says where a match may end.
"""

from __future__ import annotations

import json
import random
import re
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from typing import Any

from jsonschema import Draft202012Validator

from headrace.core.grammar import Grammar, GrammarKind

WORDS = ("red", "green", "blue", "a b", "x", "Zürich", "日本", 'say "hi"', "back\\slash", "tab\there", "0", "true", "-1.5e3")
EXPRESSIONS = ("^[a-z]{1,8}$", "^(yes|no|maybe)$", "^[A-F0-9]{2}(-[A-F0-9]{2}){2}$", "^x{0,5}y$")
NAMES = ("name", "id", "tags", "value", "kind", "größe", "with space", "n", "next", "a.b")


@dataclass(frozen=True)
class Sample:
    grammar: Grammar
    is_valid: Callable[[str], bool]


# --- JSON schemas


def schemas(count: int, seed: int) -> Iterator[Sample]:
    rng = random.Random(seed)
    for _ in range(count):
        defs: dict[str, Any] = {}
        schema = _schema(rng, 3, defs)
        if defs:
            schema = {"$defs": defs, **schema}
        Draft202012Validator.check_schema(schema)
        yield Sample(Grammar(GrammarKind.JSON_SCHEMA, json.dumps(schema, ensure_ascii=rng.random() < 0.5)), partial(is_document, schema))


def is_document(schema: dict[str, Any], text: str) -> bool:
    try:
        value = json.loads(text, object_pairs_hook=_without_duplicates)
    except ValueError:
        return False
    return bool(Draft202012Validator(schema, format_checker=Draft202012Validator.FORMAT_CHECKER).is_valid(value))


def _without_duplicates(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    if len(dict(pairs)) != len(pairs):
        raise ValueError("a key stands twice")
    return dict(pairs)


def _schema(rng: random.Random, depth: int, defs: dict[str, Any]) -> dict[str, Any]:
    if depth and rng.random() < 0.75:
        make = rng.choice((_object, _object, _array, _any_of, _ref))
        return make(rng, depth - 1, defs)
    return rng.choice(LEAVES)(rng)


def _string(rng: random.Random) -> dict[str, Any]:
    kind = rng.randrange(4)
    if kind == 0:
        low = rng.randrange(4)
        return {"type": "string", "minLength": low, "maxLength": low + rng.randrange(12)}
    if kind == 1:
        return {"type": "string", "pattern": rng.choice(EXPRESSIONS)}
    if kind == 2:
        return {"type": "string", "format": rng.choice(("date", "time", "date-time", "uuid", "ipv4"))}
    return {"type": "string", "enum": rng.sample(WORDS, rng.randint(1, 5))}


def _integer(rng: random.Random) -> dict[str, Any]:
    low = rng.randint(-1000, 1000)
    return {"type": "integer", "minimum": low, "maximum": low + rng.randrange(2000)}


def _number(rng: random.Random) -> dict[str, Any]:
    low = rng.randint(-50, 50)
    return {"type": "number", "minimum": low, "maximum": low + rng.randint(1, 100)}


def _enum(rng: random.Random) -> dict[str, Any]:
    return {"enum": rng.sample([*WORDS, 1, 2.5, None, True, -7], rng.randint(1, 6))}


def _const(rng: random.Random) -> dict[str, Any]:
    return {"const": rng.choice((*WORDS, 3, None, False, 1.25))}


def _literal(rng: random.Random) -> dict[str, Any]:
    return {"type": rng.choice(("boolean", "null"))}


LEAVES: tuple[Callable[[random.Random], dict[str, Any]], ...] = (_string, _integer, _number, _enum, _const, _literal)


def _object(rng: random.Random, depth: int, defs: dict[str, Any]) -> dict[str, Any]:
    names = rng.sample(NAMES, rng.randint(0, 4))
    properties = {name: _schema(rng, depth, defs) for name in names}
    required = [name for name in names if rng.random() < 0.6]
    return {"type": "object", "properties": properties, "required": required, "additionalProperties": False}


def _array(rng: random.Random, depth: int, defs: dict[str, Any]) -> dict[str, Any]:
    if rng.random() < 0.3:
        items = [_schema(rng, depth, defs) for _ in range(rng.randint(1, 3))]
        return {"type": "array", "prefixItems": items, "items": False, "minItems": len(items)}
    low = rng.randrange(3)
    return {"type": "array", "items": _schema(rng, depth, defs), "minItems": low, "maxItems": low + rng.randrange(3)}


def _any_of(rng: random.Random, depth: int, defs: dict[str, Any]) -> dict[str, Any]:
    return {"anyOf": [_schema(rng, depth, defs) for _ in range(rng.randint(2, 3))]}


def _ref(rng: random.Random, depth: int, defs: dict[str, Any]) -> dict[str, Any]:
    name = f"part{len(defs)}"
    defs[name] = {}  # taken before its parts take theirs
    defs[name] = _schema(rng, depth, defs)
    return {"$ref": f"#/$defs/{name}"}


# --- regular expressions and Lark grammars: one tree, rendered in either language


@dataclass(frozen=True)
class Pattern:
    """A part of a grammar.

    kind  "text" and "rule" (its name) in `text`; "chars": one of those in `text`; "all": parts in order; "any": one of the parts;
          "times": low..high times the only part
    """

    kind: str
    text: str = ""
    parts: tuple[Pattern, ...] = ()
    low: int = 0
    high: int = 0

    def ends(self, given: str, begins: frozenset[int], rules: dict[str, Pattern]) -> frozenset[int]:
        """Where in `given` a match that begins at one of `begins` may end. A rule that names itself must take something first."""
        if not begins:
            return begins
        match self.kind:
            case "text":
                return frozenset(at + len(self.text) for at in begins if given.startswith(self.text, at))
            case "chars":
                return frozenset(at + 1 for at in begins if at < len(given) and given[at] in self.text)
            case "rule":
                return rules[self.text].ends(given, begins, rules)
            case "any":
                return frozenset().union(*(part.ends(given, begins, rules) for part in self.parts))
            case "all":
                for part in self.parts:
                    begins = part.ends(given, begins, rules)
                return begins
        found = begins if self.low == 0 else frozenset()
        for number in range(1, self.high + 1):
            begins = self.parts[0].ends(given, begins, rules)
            found |= begins if number >= self.low else frozenset()
        return found

    def regex(self) -> str:
        match self.kind:
            case "text":
                return re.escape(self.text)
            case "chars":
                return "[" + "".join(re.escape(char) for char in self.text) + "]"
            case "any":
                return "(?:" + "|".join(part.regex() for part in self.parts) + ")"
            case "all":
                return "".join(part.regex() for part in self.parts)
        return f"(?:{self.parts[0].regex()}){self._count('?', '{{{},{}}}')}"

    def lark(self) -> str:
        match self.kind:
            case "text":
                return json.dumps(self.text, ensure_ascii=False)
            case "chars":
                return "/" + Pattern("chars", self.text).regex().replace("/", "\\/") + "/"
            case "rule":
                return self.text
            case "any":
                return "(" + " | ".join(part.lark() for part in self.parts) + ")"
            case "all":
                return "(" + " ".join(part.lark() for part in self.parts) + ")"
        return f"({self.parts[0].lark()}){self._count('?', '{{{},{}}}')}"

    def _count(self, maybe: str, counted: str) -> str:
        return maybe if (self.low, self.high) == (0, 1) else counted.format(self.low, self.high)


LETTERS = "abcdefghijklmnopqrstuvwxyz"
TEXTS = ("ab", "if", "->", "(", ")", "{}", "+", "straße", "0x", "*", ".", "\\n", "a|b", "日本", '"')
CLASSES = (LETTERS, "0123456789", "ABCDEF", "aeiou", " _-", "äöü", "+-*/", "01")


def regexes(count: int, seed: int) -> Iterator[Sample]:
    rng = random.Random(seed)
    for _ in range(count):
        expression = _pattern(rng, 3, ()).regex()
        yield Sample(Grammar(GrammarKind.REGEX, expression), partial(_matches_whole, re.compile(expression)))


def _matches_whole(expression: re.Pattern[str], text: str) -> bool:
    return expression.fullmatch(text) is not None


def larks(count: int, seed: int) -> Iterator[Sample]:
    """Grammars of up to three terminals and up to three rules, each of which names only what stands before it; some have a rule that
    recurs, in brackets.
    """
    rng = random.Random(seed)
    for _ in range(count):
        rules: dict[str, Pattern] = {}
        for number in range(rng.randint(1, 3)):
            rules[f"WORD{number}"] = _pattern(rng, 2, tuple(rules))
        for number in range(rng.randint(0, 3)):
            rules[f"rule{number}"] = _pattern(rng, 2, tuple(rules))
        if rng.random() < 0.4:
            inside = Pattern("all", parts=(Pattern("text", "<"), Pattern("rule", "nested"), Pattern("text", ">")))
            rules["nested"] = Pattern("any", parts=(inside, Pattern("rule", list(rules)[-1])))
        start = Pattern("all", parts=(*[Pattern("rule", name) for name in list(rules)[-2:]], _pattern(rng, 1, tuple(rules))))
        source = "\n".join([f"start: {start.lark()}", *[f"{name}: {pattern.lark()}" for name, pattern in rules.items()]])
        yield Sample(Grammar(GrammarKind.LARK, source), partial(_parses, start, rules))


def _parses(start: Pattern, rules: dict[str, Pattern], text: str) -> bool:
    return len(text) in start.ends(text, frozenset({0}), rules)


def _pattern(rng: random.Random, depth: int, rules: tuple[str, ...]) -> Pattern:
    if not depth:
        leaves = [Pattern("text", rng.choice(TEXTS)), Pattern("chars", rng.choice(CLASSES))]
        return rng.choice([*leaves, Pattern("rule", rng.choice(rules))] if rules else leaves)
    parts = tuple(_pattern(rng, depth - 1, rules) for _ in range(rng.randint(2, 3)))
    kind = rng.choice(("all", "any", "times"))
    if kind == "times":
        low = rng.randrange(3)
        return Pattern("times", parts=parts[:1], low=low, high=low + rng.randint(1, 4))
    return Pattern(kind, parts=parts)
