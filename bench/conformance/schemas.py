"""Generates JSON schemas with values that may or may not satisfy them. The package `jsonschema` judges the values, not the generator.

A `Generator` draws a schema together with a way to draw values for it; `mutated` changes one thing in such a value. Both are functions of a
seed. Schemas use the keywords that the engine supports, and stay bounded: strings, arrays and recursion have a greatest size.
"""

from __future__ import annotations

import random
import string
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

import jsonschema

Schema = dict[str, Any]
Draw = Callable[[], Any]
"""Draws a value that probably satisfies the schema that it was made with."""

MAX_LEVELS = 3
VALUES_PER_SCHEMA = 12
"""Values drawn for each schema, and as many changed ones."""

_WORDS = ("name", "id", "tags", "size", "city", "a b", 'q"uote', "caf\u00e9", "x/y", "")
_TEXTS = ("", "a", "Zed", "12", "a b", 'say "hi"', "tab\there", "caf\u00e9", "\U0001f600", "back\\slash", "</x>")


@dataclass(frozen=True, slots=True)
class SchemaCase:
    """A schema with values. Keys of valid values stand in the order in which the schema declares them."""

    schema: Schema
    valid: list[Any] = field(default_factory=list)
    invalid: list[Any] = field(default_factory=list)


def cases(num_cases: int, *, seed: int = 0) -> Iterator[SchemaCase]:
    """Cases with at least one valid and one invalid value each."""
    number = 0
    while num_cases:
        case = _case(random.Random(f"{seed}-{number}"))
        number += 1
        if case.valid and case.invalid:
            num_cases -= 1
            yield case


def _case(rng: random.Random) -> SchemaCase:
    generator = Generator(rng)
    schema, draw = generator.any(0)
    if generator.definitions:
        schema = {**schema, "$defs": generator.definitions} if "$ref" not in schema else {"allOf": [schema], "$defs": generator.definitions}
    validator = jsonschema.Draft202012Validator(schema)
    case = SchemaCase(schema)
    for _ in range(VALUES_PER_SCHEMA):
        value = draw()
        for each in (value, mutated(value, rng)):
            (case.valid if validator.is_valid(each) else case.invalid).append(each)
    return case


class Generator:
    """definitions  schemas that `$ref`s of the drawn schema name"""

    def __init__(self, rng: random.Random) -> None:
        self._rng = rng
        self.definitions: dict[str, Schema] = {}
        self._draws: dict[str, Draw] = {}

    def any(self, level: int) -> tuple[Schema, Draw]:
        rng = self._rng
        leaves = (self._integer, self._number, self._string, self._constant, self._plain)
        inner = (self._object, self._object, self._object, self._array, self._choice, self._reference, self._tuple)
        make = rng.choice(leaves if level >= MAX_LEVELS or (level and rng.random() < 0.5) else inner)
        return make(level)

    def _plain(self, level: int) -> tuple[Schema, Draw]:
        values: dict[str, list[Any]] = {"boolean": [True, False], "null": [None], "integer": [0, -7, 123456]}
        kinds = self._rng.choice((["boolean"], ["null"], ["boolean", "null"], ["integer", "null"]))
        schema = {"type": kinds if len(kinds) > 1 else kinds[0]}
        return schema, lambda: self._rng.choice([value for kind in kinds for value in values[kind]])

    def _constant(self, level: int) -> tuple[Schema, Draw]:
        values = self._rng.sample(_TEXTS, 3) + self._rng.sample([0, -3, 17, 2.5, True, None], 2)
        if self._rng.random() < 0.3:
            return {"const": values[0]}, lambda: values[0]
        return {"enum": values}, lambda: self._rng.choice(values)

    def _integer(self, level: int) -> tuple[Schema, Draw]:
        rng = self._rng
        low, high = sorted((rng.randint(-200, 200), rng.randint(-200, 2000)))
        schema: Schema = {"type": "integer"}
        if rng.random() < 0.5:
            schema |= {"minimum": low} if rng.random() < 0.7 else {"exclusiveMinimum": low - 1}
        if rng.random() < 0.5:
            schema |= {"maximum": high} if rng.random() < 0.7 else {"exclusiveMaximum": high + 1}
        if rng.random() < 0.2:
            factor = schema["multipleOf"] = rng.choice((2, 5, 10))
            return schema, lambda: rng.randint(low // factor, high // factor + 1) * factor
        return schema, lambda: rng.randint(low, high)

    def _number(self, level: int) -> tuple[Schema, Draw]:
        rng = self._rng
        low, high = sorted((round(rng.uniform(-50, 50), 2), round(rng.uniform(-50, 500), 2)))
        schema: Schema = {"type": "number"}
        if rng.random() < 0.5:
            schema["minimum"] = low
        if rng.random() < 0.5:
            schema["maximum"] = high
        return schema, lambda: rng.choice((round(rng.uniform(low, high), rng.randint(1, 6)), rng.randint(int(low), int(high) + 1)))

    def _string(self, level: int) -> tuple[Schema, Draw]:
        rng = self._rng
        if rng.random() < 0.3:
            pattern, draw = rng.choice(_PATTERNS)
            return {"type": "string", "pattern": pattern}, lambda: draw(rng)
        low, high = sorted((rng.randint(0, 6), rng.randint(0, 12)))
        schema: Schema = {"type": "string"}
        if rng.random() < 0.5:
            schema["minLength"] = low
        if rng.random() < 0.5:
            schema["maxLength"] = high
        return schema, lambda: "".join(rng.choices(string.printable.strip() + " \u00e9\u4e2d\U0001f600\n", k=rng.randint(low, high)))

    def _object(self, level: int) -> tuple[Schema, Draw]:
        rng = self._rng
        names = rng.sample(_WORDS, rng.randint(1, 4))
        fields = {name: self.any(level + 1) for name in names}
        required = [name for name in names if rng.random() < 0.6]
        schema: Schema = {"type": "object", "properties": {name: made for name, (made, _) in fields.items()}}
        if required:
            schema["required"] = required
        more: Draw | None = None
        kind = rng.random()
        if kind < 0.5:
            schema["additionalProperties"] = False
        elif kind < 0.7:
            schema["additionalProperties"], more = self._integer(level)

        def draw() -> Any:
            value = {name: make() for name, (_, make) in fields.items() if name in required or rng.random() < 0.5}
            return {**value, **({"extra": more()} if more is not None and rng.random() < 0.5 else {})}

        return schema, draw

    def _array(self, level: int) -> tuple[Schema, Draw]:
        rng = self._rng
        item, make = self.any(level + 1)
        low, high = sorted((rng.randint(0, 2), rng.randint(0, 4)))
        schema: Schema = {"type": "array", "items": item, "maxItems": high}
        if rng.random() < 0.5:
            schema["minItems"] = low
        return schema, lambda: [make() for _ in range(rng.randint(low, high))]

    def _tuple(self, level: int) -> tuple[Schema, Draw]:
        made = [self.any(level + 1) for _ in range(self._rng.randint(1, 3))]
        schema = {"type": "array", "prefixItems": [item for item, _ in made], "items": False, "minItems": len(made)}
        return schema, lambda: [make() for _, make in made]

    def _choice(self, level: int) -> tuple[Schema, Draw]:
        made = [self.any(level + 1) for _ in range(self._rng.randint(2, 3))]
        return {"anyOf": [one for one, _ in made]}, lambda: self._rng.choice(made)[1]()

    def _reference(self, level: int) -> tuple[Schema, Draw]:
        """A definition; now and then one that has been named before."""
        if not self._draws or self._rng.random() < 0.7:
            schema, draw = self.any(level + 1)
            name = f"d{len(self._draws)}"
            self.definitions[name], self._draws[name] = schema, draw
        name = self._rng.choice(sorted(self._draws))
        return {"$ref": f"#/$defs/{name}"}, self._draws[name]


def _digits(rng: random.Random, count: int) -> str:
    return "".join(rng.choices(string.digits, k=count))


_PATTERNS: tuple[tuple[str, Callable[[random.Random], str]], ...] = (
    (r"^[A-Z]{2,3}-[0-9]{3}$", lambda rng: f"{rng.choice(('AB', 'XYZ'))}-{_digits(rng, 3)}"),
    (r"^(yes|no|may be)$", lambda rng: rng.choice(("yes", "no", "may be"))),
    (r"^\d{4}-\d{2}$", lambda rng: f"{_digits(rng, 4)}-{_digits(rng, 2)}"),
    (r"[aeiou]{2}", lambda rng: rng.choice(("book", "ea", "queue"))),
    (r"^#?[0-9a-f]{6}$", lambda rng: rng.choice(("#00ff7f", "abcdef"))),
)


def mutated(value: Any, rng: random.Random) -> Any:
    """The value with one thing changed, somewhere in it."""
    if isinstance(value, dict) and value and rng.random() < 0.8:
        name = rng.choice(list(value))
        change = rng.random()
        if change < 0.2:
            return {key: item for key, item in value.items() if key != name}
        if change < 0.35:
            return {**value, "unknown": rng.choice((1, "x", None))}
        return {**value, name: mutated(value[name], rng)}
    if isinstance(value, list) and value and rng.random() < 0.8:
        at = rng.randrange(len(value))
        return value[:at] + value[at + 1 :] if rng.random() < 0.3 else [*value[:at], mutated(value[at], rng), *value[at + 1 :]]
    if isinstance(value, str) and rng.random() < 0.6:
        return rng.choice((value + "x", value[:-1], value * 3, value.swapcase()))
    if isinstance(value, int | float) and not isinstance(value, bool) and rng.random() < 0.6:
        return rng.choice((value + 1, value - 1000, value * 10, -value))
    return rng.choice((None, True, 0, -999, 3.25, "other", [], {}, [1, "x"], {"unknown": 1}))


def num_keywords(schema: object, counts: dict[str, int]) -> Mapping[str, int]:
    """How often each keyword occurs, added to `counts`."""
    if isinstance(schema, dict):
        for key, value in schema.items():
            counts[key] = counts.get(key, 0) + 1
            inside = list(value.values()) if key in ("properties", "$defs") and isinstance(value, dict) else value
            if key not in ("enum", "const", "required"):
                num_keywords(inside, counts)
    elif isinstance(schema, list):
        for item in schema:
            num_keywords(item, counts)
    return counts
