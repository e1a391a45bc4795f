"""Tests patterns construct by construct: a compiled one takes a text where an engine of ECMAScript's regular expressions finds a match."""

from __future__ import annotations

import json

import pytest
import regress
from sampled_documents import is_taken

from headrace.core.errors import InvalidRequest
from headrace.core.grammar import Grammar, GrammarKind
from headrace.engine.grammar.ecma_pattern import MAX_GROUP_DEPTH, PatternRefused
from headrace.engine.grammar.limits import MAX_COUNT
from headrace.engine.grammar.pattern_text import MAX_CHARS, translated

pytestmark = pytest.mark.pure

CONTROLS = ["\b", "\t", "\n", "\f", "\r"]

UNICODE: dict[str, list[str]] = {
    "^[^a-c]$": ["a", "d", '"', "\\", "\x01", *CONTROLS, "\u00e9", "\U0001f600"],
    '^[^"]{1,2}$': ['"', 'a"', '"a', "ab", "\\", "\\\\", *CONTROLS],
    r'^[^"\\]*$': ['"', "\\", "ab", "", *CONTROLS],
    r'^[^\\/:*?"<>|]+$': ["a.b", "a\\b", 'a"b', "a/b", "a|b"],
    '^[^\\n"]$': ["a", "\n", '"', "\\", *CONTROLS],
    "^[^\\\\]$": ["a", "\\", '"', *CONTROLS],
    '^([^"a]|a)[^"]$': ["aa", 'a"', '"a', "ba"],
    "^[&&a]$": ["&", "a", "b"],
    "^[a-z&&[^aeiou]$": ["a", "b", "&", "[", "^"],
    "^[+--b~~c]$": ["+", "-", "b", "~", "c", ".", "a"],
    r"^\d$": ["5", "\u0665", "a"],
    r"^\D$": ["5", "\u0665", "a", "\n"],
    r"^\w\W$": ["a-", "_\u00e9", "\u00e9-", "-a", "ab"],
    r"^\s$": [" ", "\t", "\n", "\u00a0", "\ufeff", "\u2003", "\u2029", "\u180e", "\u0085", "x"],
    r"^[\S\n]$": [" ", "\n", "x"],
    r"^\x41\u0042\u{43}\u{1F600}\uD83D\uDE00$": ["ABC\U0001f600\U0001f600", "ABC\U0001f600"],
    r"^[\uD83D\uDE00-\uD83D\uDE4F]$": ["\U0001f600", "\U0001f64f", "\U0001f650", "a"],
    "^[\U0001f600-\U0001f64f]{2}$": ["\U0001f600\U0001f64f", "\U0001f600"],
    r"^[^\uD800-\uDFFF]$": ["a", "\U0001f600"],
    r"^\cJ\t\f\r[\b]$": ["\n\t\f\r\b", "J\t\f\r\b"],
    r"^\/\.\*\\\^\$\|\(\)\[\]\{\}\+\?$": ["/.*\\^$|()[]{}+?", "/x*\\^$|()[]{}+?"],
    "^.$": ["a", "\n", "\r", "\u2028", "\u2029", "\u0085", '"', "\\", "\U0001f600"],
    "^(?s:.)$": ["a", "\n", "\u2028"],
    "^[]$|^x$": ["x", "", "a"],
    "^[^]$": ["x", "\n", '"'],
    "^a{2,3}?b*?c+?d??$": ["aac", "aaabbccd", "ac", "aaaac"],
    "^a{0}b{2}c{1,}$": ["bbc", "bbccc", "abbc", "bc"],
    "^(?<year>[0-9]{2})-(?:x|y)(z)$": ["12-xz", "12-yz", "12-z"],
    "b": ["b", "abc", "", "a\nb"],
    "^ab|cd$": ["abx", "xcd", "xab", "cdx"],
    "(^|,)x($|,)": ["x", "a,x", "x,b", "a,x,b", "ax", "xb", "a,xb"],
    "^(a|^b)(c$|d)": ["ac", "acx", "bd", "bdx", "ab"],
    "^(a?$)?x?": ["", "a", "x", "ab"],
    "a$b|c": ["ab", "c"],
    "a^|$|b": ["", "a", "xb"],
    "(^a|b)c": ["ac", "xac", "xbc"],
    "^(|a)(b|)$": ["", "a", "ab", "b", "ba"],
    r"^\p{Lu}\p{L}*\P{L}$": ["\u00c9a1", "ab1", "Aa"],
    r"^[\p{Script=Greek}\d]+$": ["\u03b1\u03b29", "a"],
    r'^[^\p{L}"]$': ["1", "a", '"', "\\", "\n"],
    r"^[\P{P}a]$": ["a", "\n", '"', "\\", "."],
    r"^\p{gc=Nd}\p{ASCII}[\p{White_Space}x]$": ["1a ", "1\u00e9x", "aax", "1ax"],
    "^(?=.*[0-9])[a-z0-9]+$": ["a1", "a", "1"],
    '^(?!.*").*$': ['a"', "a", "a\\", '"'],
    "^(?!.*x)[^]*$": ["a\nx", "ax", "a"],
    "^(?![^]*x)[^]*$": ["a\nx", "ax", "a"],
    "^(?!.*--)[^]*$": ["a--", "a-b-", "\n--", "-\n-", "-"],
    "^(?!.*-$)[^]*$": ["a-", "-", "\n-", "-a", ""],
    "^(?!a|bc)[a-c]*$": ["a", "b", "bc", "ca", ""],
    "^(?!ab$)[a-c]*$": ["a", "ab", "abc", "b", ""],
    "^(?!\\d*$)": ["12", "a", "1a", ""],
}
MODIFIERS: dict[str, list[str]] = {
    "^(?i:aK[^s])k$": ["Akxk", "AKxK", "akSk", "ak\u017fk", "a\u212axk"],
    r"^(?i:[a-c\W]\w)$": ["Bk", "-\u017f", "b\u212a", "dk"],
    "^(?s-i:.)(?:.)$": ["\na", "a\n"],
}
LENIENT: dict[str, list[str]] = {
    "^[[a-z]]$": ["a]", "[]", "a", "[a]", "]"],
    "^[[:alpha:]]$": ["a]", ":]", "z", "a"],
    "^{a}]{,2}$": ["{a}]{,2}", "{a}]"],
    "^x{1$": ["x{1", "x"],
    r"^\-\_\@\'\"$": ["-_@'\"", "\\-_@'\""],
    r"^[\w-.]$": ["a", "-", ".", "/"],
    r"^[+-\d]$": ["+", "-", "3", ",", "0"],
}
JUDGED = [
    *((pattern, "u", texts) for pattern, texts in {**UNICODE, **MODIFIERS}.items()),
    *((pattern, "", LENIENT[pattern]) for pattern in LENIENT),
]


def grammar(pattern: str) -> Grammar:
    return Grammar(GrammarKind.JSON_SCHEMA, json.dumps({"type": "string", "pattern": pattern}))


@pytest.mark.parametrize(("pattern", "flags", "texts"), JUDGED, ids=[ascii(pattern) for pattern, _, _ in JUDGED])
def test_a_pattern_takes_what_ecmascript_matches(pattern: str, flags: str, texts: list[str]) -> None:
    judge = regress.Regex(pattern, flags)
    for text in texts:
        assert is_taken(grammar(pattern), json.dumps(text, ensure_ascii=False)) == (judge.find(text) is not None), ascii(text)


@pytest.mark.parametrize("pattern", [pattern for pattern, _, _ in JUDGED], ids=ascii)
def test_a_translation_is_translated_into_itself(pattern: str) -> None:
    """Rules that are rewritten are read again."""
    found = translated(pattern)
    assert [again for expression in found for again in translated(expression)] == found


@pytest.mark.parametrize(("pattern", "same"), [("(?i)ab", "(?i:ab)"), ("(?P<n>a)", "(a)"), ("(?is).", "[^]")])
def test_two_forms_of_other_dialects_have_one_meaning(pattern: str, same: str) -> None:
    assert translated(pattern) == translated(same)


REFUSED = {
    r"\bword": "word boundaries",
    r"a\B": "word boundaries",
    r"(a)\1": "back references",
    r"(?<n>a)\k<n>": "back references",
    "(?<=a)b": "look-behind",
    "(?<!a)b": "look-behind",
    "a(?=b)": "directly after",
    "(?=a)b": "directly after.*Write \\^ before it",
    "(?=a)b|c": "directly after",
    "^(?=a)b|c": "directly after",
    "^a(?=b)": "directly after",
    "^(?=a(?=b))c": "directly after",
    "^(?=a": "balanced",
    "^(?!.*foo)": "negative look-around",
    r"^(?!\p{L})": "negative look-around",
    "(^a|b)+": "repetition",
    "(?m:^a)": "flag m",
    "(?i:\u00e9)": "ASCII",
    "(?i:[a-\u00ff])": "ASCII",
    r"\p{Greek}": "general categories",
    r"\p{L": "general categories",
    r"\Aa": r"no \\A",
    r"a\Z": r"no \\Z",
    r"\a": r"no \\a",
    r"\07": r"no \\0",
    r"\x4": "two",
    r"\u{110000}": "10FFFF",
    r"\u00": "four",
    r"\c1": r"no \\c",
    "a**": "stands before",
    "+a": "stands before",
    "{2}": "before a count",
    "^*": "not repeated",
    "a{2,1}": "in order",
    "[b-a]": "in order",
    "(?>a)": "groups",
    "(?#a)": "groups",
    "(a": "balanced",
    "a)": "balanced",
    "[a": "closed",
    "a\\": "backslash",
    "(" * (MAX_GROUP_DEPTH + 1): "levels",
    f"a{{{MAX_COUNT + 1}}}": "counts of at most",
    "a{1" + "0" * 5000 + "}": "counts of at most",
    r"^\x00$": "JSON string",
    r"^\uD83D$": "JSON string",
    "[]": "JSON string",
    "a^b": "JSON string",
}


@pytest.mark.parametrize("pattern", REFUSED, ids=lambda pattern: ascii(pattern)[:40])
def test_what_has_no_exact_form_is_refused_by_name(pattern: str) -> None:
    with pytest.raises(InvalidRequest, match=REFUSED[pattern]) as refused:
        is_taken(grammar(pattern), '""')
    assert "#/pattern" in str(refused.value)


def test_names_of_properties_are_matched_alike() -> None:
    schema = {
        "type": "object",
        "patternProperties": {'^[^"]$': {"type": "null"}, "^[[a]]$": {"type": "boolean"}},
        "additionalProperties": False,
    }
    whole = Grammar(GrammarKind.JSON_SCHEMA, json.dumps(schema))
    assert is_taken(whole, '{"a": null, "[]": true}')
    assert not is_taken(whole, '{"\\"": null}')
    names = Grammar(GrammarKind.JSON_SCHEMA, json.dumps({"type": "object", "propertyNames": {"pattern": "^[[a]]$"}}))
    assert is_taken(names, '{"a]": 1}')
    assert not is_taken(names, '{"a": 1}')
    with pytest.raises(InvalidRequest, match="patternProperties"):
        is_taken(Grammar(GrammarKind.JSON_SCHEMA, json.dumps({"patternProperties": {"^\\d$": {"type": "null"}, "^[0-9]$": {}}})), "{}")


def test_anchors_within_an_expression_do_not_let_it_explode() -> None:
    nested = "(?:^a|b|c$|)"
    for _ in range(11):
        nested = f"(?:{nested}d?{nested})"
    with pytest.raises(PatternRefused, match=str(MAX_CHARS)):
        translated(nested)


def test_a_control_character_beside_a_set_without_quotes_is_left_out() -> None:
    """llguidance would take a quote for a member of a set that holds all control characters."""
    assert is_taken(grammar(r'^(?:\x00|[^"])$'), '"a"')
    assert not is_taken(grammar(r'^(?:\x00|[^"])$'), '"\\""')
    assert not is_taken(grammar(r'^(?:a\x00|a[^"\\])$'), '"a\\\\"')
