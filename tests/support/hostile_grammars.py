"""Lists two hundred grammars that are hostile or odd: each is refused by name, or compiled and matched within its limits.

They are built for the ways in which compiling or matching could take long, take memory, overflow a stack or read what it must not.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

from headrace.core.grammar import Grammar, GrammarKind

Case = tuple[str, Grammar]


def cases() -> list[Case]:
    made = [*_schemas(), *_regexes(), *_larks()]
    assert len({name for name, _ in made}) == len(made)
    return made


def _schema(value: Any) -> Grammar:
    return Grammar(GrammarKind.JSON_SCHEMA, value if isinstance(value, str) else json.dumps(value))


def _nested(levels: int, leaf: Any) -> Any:
    for _ in range(levels):
        leaf = {"type": "object", "properties": {"a": leaf}, "required": ["a"]}
    return leaf


def _schemas() -> Iterator[Case]:
    for levels in (10, 20, 31, 32, 100, 400):
        yield f"nested objects {levels}", _schema(_nested(levels, {}))
    for levels in (500, 5_000, 20_000):
        yield f"nested text {levels}", _schema('{"items":' * levels + "{}" + "}" * levels)
        yield f"brackets {levels}", _schema("[" * levels + "]" * levels)
        yield f"open brackets {levels}", _schema("[" * levels)
    for count in (100, 1_000, 3_000, 6_000):
        names = {f"p{i}": {"type": "string"} for i in range(count)}
        yield f"properties {count}", _schema({"type": "object", "properties": names})
        yield f"required properties {count}", _schema({"type": "object", "properties": names, "required": list(names)})
    for count in (1_000, 5_000, 12_000):
        yield f"enum {count}", _schema({"enum": [f"value {i}" for i in range(count)]})
        yield f"enum of objects {count}", _schema({"enum": [{"a": i} for i in range(count)]})
    yield "a long constant", _schema({"const": "a" * 200_000})
    yield "references in a circle", _schema({"$ref": "#/$defs/a", "$defs": {"a": {"$ref": "#/$defs/b"}, "b": {"$ref": "#/$defs/a"}}})
    yield "a reference to itself", _schema({"$ref": "#"})
    yield "allOf of itself", _schema({"$ref": "#/$defs/a", "$defs": {"a": {"allOf": [{"$ref": "#/$defs/a"}, {"type": "string"}]}}})
    yield "anyOf of itself", _schema({"$ref": "#/$defs/a", "$defs": {"a": {"anyOf": [{"$ref": "#/$defs/a"}, {"type": "string"}]}}})
    tree = {"type": "object", "properties": {"x": {"$ref": "#/$defs/t"}, "y": {"$ref": "#/$defs/t"}}}
    yield "a tree of references", _schema({"$ref": "#/$defs/t", "$defs": {"t": tree}})
    yield "a required tree of references", _schema({"$ref": "#/$defs/t", "$defs": {"t": {**tree, "required": ["x", "y"]}}})
    for url in ("http://127.0.0.1:1/x", "https://example.com/a.json", "file:///etc/passwd", "/etc/passwd", "#/missing", "urn:a"):
        yield f"reference {url}", _schema({"$ref": url})
    for depth in (10, 25, 200):
        chain = {f"d{i}": {"allOf": [{"$ref": f"#/$defs/d{i + 1}"}] * 2} for i in range(depth)}
        yield f"doubled allOf {depth}", _schema({"$ref": "#/$defs/d0", "$defs": {**chain, f"d{depth}": {"type": "object"}}})
        pair = {f"d{i}": {"properties": {k: {"$ref": f"#/$defs/d{i + 1}"} for k in "ab"}} for i in range(depth)}
        yield f"doubled properties {depth}", _schema({"$ref": "#/$defs/d0", "$defs": {**pair, f"d{depth}": {"type": "object"}}})
    for count in (6, 10, 14):
        options = [{"anyOf": [{"required": [f"k{i}"], "properties": {f"k{i}": {"const": j}}} for j in range(3)]} for i in range(count)]
        yield f"products of anyOf {count}", _schema({"type": "object", "allOf": options})
    for count in (50, 300, 2_000):
        branches = [{"type": "object", "properties": {f"a{i}": {"type": "string"}}, "required": [f"a{i}"]} for i in range(count)]
        yield f"anyOf {count}", _schema({"anyOf": branches})
        yield f"oneOf {count}", _schema({"oneOf": branches})
    for count in (1_000, 10**6, 10**9, 10**18):
        yield f"minItems {count}", _schema({"type": "array", "items": {"type": "integer"}, "minItems": count})
        yield f"minLength {count}", _schema({"type": "string", "minLength": count})
        yield f"maxLength {count}", _schema({"type": "string", "maxLength": count})
    inner = {"type": "array", "minItems": 1000, "items": {"type": "integer"}}
    yield "arrays of arrays", _schema({"type": "array", "minItems": 1000, "items": {"type": "array", "minItems": 1000, "items": inner}})
    for divisor in (7, 9_973, 99_991, 982_451_653, 10**15 + 37, 0.00001, 1e-300, 0):
        yield f"multipleOf {divisor}", _schema({"type": "number", "multipleOf": divisor})
    yield "a number between extremes", _schema({"type": "number", "minimum": 1e-300, "maximum": 1e300})
    yield "an integer of 400 digits", _schema('{"type":"integer","minimum":1' + "0" * 400 + "}")
    yield "an empty range", _schema({"type": "integer", "minimum": 5, "maximum": 4})
    for pattern in ("(a{1,500}){1,500}", "(.*a){30}", "(x+x+)+y", ".{0,100000}", "(a|aa)+$", "^(([a-z])+.)+[A-Z]$", "(?=a)b", "\\1", "["):
        yield f"pattern {pattern}", _schema({"type": "string", "pattern": pattern})
    yield "patterns that meet", _schema({"allOf": [{"type": "string", "pattern": f"(a|b)*a(a|b){{{i}}}"} for i in range(14)]})
    for count in (20, 200):
        keys = {f"^k{i}[a-z]+.*x$": {"type": "integer"} for i in range(count)}
        yield f"patternProperties {count}", _schema({"patternProperties": keys})
    keywords = "not if dependentSchemas unevaluatedProperties contains uniqueItems $dynamicRef propertyNames typo"
    for keyword in keywords.split():
        yield f"keyword {keyword}", _schema({"type": "object", keyword: {"type": "string"}})
    yield "an unknown format", _schema({"type": "string", "format": "idn-hostname"})
    formats = [{"type": "string", "format": name} for name in ("uri", "email", "uuid", "date-time", "ipv6", "duration")]
    yield "known formats", _schema({"type": "array", "prefixItems": formats})
    texts = {"a word": " x", "a list": "[1]", "a number": "1", "false": "false", "null": "null", "NaN": '{"minimum":NaN}'}
    for name, text in texts.items():
        yield f"source: {name}", _schema(text)
    yield "two documents", _schema("{}{}")
    yield "an overlong number", _schema('{"minimum":' + "9" * 5_000 + "}")
    yield "a lone surrogate", _schema('{"const":"\\ud800"}')
    yield "options of the library", _schema({"x-guidance": {"lenient": True, "whitespace_pattern": "(a|aa)*"}})


def _regexes() -> Iterator[Case]:
    sources = [
        *(f"a{{1,{count}}}" for count in (1_000, 65_000, 1_000_000, 4_000_000_000, 10**20)),
        *("(a{1,1000}){1,1000}", "((a{1,100}){1,100}){1,100}", "(((a{9}){9}){9}){9}", "([a-z]{1,3000} ?){1,3000}"),
        *("(a|b|ab)*c{100}", "(a|aa)+", "(.*a){20}", "(.*a){200}", "(?s:.*)a(?s:.){200}b", "(x+x+)+y", "(a*)*", "(a*)*b", "(a|a)*"),
        *(r"\w{200}", r"\p{L}{1000}", r"[^\p{L}\p{N}]{500}", r"(?i)\p{Greek}{300}", r"\X", r"\R"),
        *("(?=a)b", "(?!a)b", "(?<=a)b", r"\bfoo\b", r"(a)\1", "(?R)", "(?>a)", "a++", "(?P<x>a)(?P=x)"),
        *("(", ")", "[", "a**", "{1}", "a{2,1}", "(?z)a", "\\", "(?-u)\\xff", "\x00", "[]", "[^\\x00-\\x{10FFFF}]", "$^", "a^b"),
    ]
    for source in sources:
        yield f"regex {source[:40]}", Grammar(GrammarKind.REGEX, source)
    for count in (200, 2_000, 100_000):
        yield f"parentheses {count}", Grammar(GrammarKind.REGEX, "(" * count + "a" + ")" * count)
    for count in (2_000, 20_000):
        words = "|".join(f"word{i}" for i in range(count))
        yield f"words {count}", Grammar(GrammarKind.REGEX, words)
        yield f"words of either case {count}", Grammar(GrammarKind.REGEX, f"(?i){words}")
    yield "pairs", Grammar(GrammarKind.REGEX, "(a|b)" * 10_000)
    yield "a long literal", Grammar(GrammarKind.REGEX, "a" * 250_000)
    yield "counted alternatives", Grammar(GrammarKind.REGEX, "(" + "|".join(f"(a{{{i}}}b)*" for i in range(1, 400)) + ")*")


def _larks() -> Iterator[Case]:
    sources = {
        "left recursion": 'start: start "a" | "a"',
        "endless": 'start: "a" start',
        "a rule that is itself": "start: start",
        "rules in a circle": 'start: a\na: b | "x"\nb: a',
        "empty loop": 'start: a*\na: ""',
        "empty loops": 'start: a*\na: b*\nb: ""',
        "ambiguous": 'start: s\ns: s s | "a"',
        "very ambiguous": 'start: s\ns: s s s | s s | "a" | ""',
        "palindromes": 'start: "a" start "a" | "b" start "b" | ""',
        "a million": 'start: a{1,1000000}\na: b{1,1000000}\nb: "x"',
        "a thousand cubed": 'start: a{1000}\na: b{1000}\nb: c{1000}\nc: "x"',
        "a recursive terminal": 'start: A\nA: "x" A',
        "nothing": "",
        "no start": 'foo: "a"',
        "undefined": "start: foo",
        "a path to import": '%import ../../etc/passwd\nstart: "a"',
        "a module to import": "%import os.system\nstart: INT",
        "any token": "start: <[*]>{1,100000}",
        "no such token": "start: <[4294967295]>",
        "no such name": "start: <|no_such_token|>",
        "a token range backwards": "start: <[10-5]>",
        "a nested grammar": "start: @answer",
        "a grammar that is not there": "start: @other",
        "max_tokens": "start: a\na[max_tokens=3]: /.*/",
        "stop": 'start: a "x"\na[stop="x"]: /.*/',
        "temperature": "start: a\na[temperature=9]: /.*/",
        "negated": "start: A\nA: ~/(?s:.*)/",
        "met negations": "start: A\nA: " + " & ".join(f"~/(?s:.*)a{{{i}}}b(?s:.*)/" for i in range(1, 60)),
        "substrings": 'start: S\nS: %regex {"substring_chars": "' + "abcdefgh" * 8_000 + '"}',
        "a schema within": 'start: %json {"type":"object","unevaluatedProperties":false}',
        "a deep schema within": "start: %json " + '{"items":' * 500 + "{}" + "}" * 500,
        "unknown options": '%llguidance {"no_such": 1}\nstart: "a"',
        "noise": "\x00\xff\ud7ff" * 1_000,
        "GBNF": 'root ::= "a" root',
    }
    for name, source in sources.items():
        yield f"lark {name}", Grammar(GrammarKind.LARK, source)
    for count in (100, 2_000, 8_000):
        rules = "".join(f'r{i}: "x" r{i + 1} | "y"\n' for i in range(count))
        yield f"rules in a chain {count}", Grammar(GrammarKind.LARK, f'start: r0\n{rules}r{count}: "x"')
        letters = "".join(f"r{i}: r{i + 1}\n" for i in range(count))
        yield f"rules of one rule {count}", Grammar(GrammarKind.LARK, f'start: r0\n{letters}r{count}: "x"')
        parentheses = "(" * count + '"a"' + ")" * count
        yield f"lark parentheses {count}", Grammar(GrammarKind.LARK, f"start: {parentheses}")
        yield f"lexemes {count}", Grammar(GrammarKind.LARK, "start: " + " | ".join(f"/[a-z]*{i}/" for i in range(count)))
    for count in (20, 60):
        doubled = "".join(f"r{i}: r{i + 1} r{i + 1}\n" for i in range(count))
        yield f"doubled rules {count}", Grammar(GrammarKind.LARK, f'start: r0\n{doubled}r{count}: "x"')
        yield f"doubled terminals {count}", Grammar(GrammarKind.LARK, f'start: T0\n{doubled.replace("r", "T")}T{count}: "x"')
