"""Tests compiled grammars: the texts that they take, the tokens that their masks allow, and the refusal of one that cannot be compiled."""

from __future__ import annotations

import json
import random
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from grammar_kit import EOS, PERSON, VOCAB, compiled, encode, lark, mask_of, matches, regex, schema, tokenizer, trie, vocabulary

from headrace.core.errors import CheckpointError, InvalidRequest
from headrace.core.grammar import Grammar, GrammarKind, ReasoningSpan
from headrace.engine.grammar.compiling import GrammarVocabulary, TokenTrie, compile_grammar
from headrace.engine.grammar.limits import MAX_JSON_DEPTH

pytestmark = pytest.mark.pure

THOUGHT = ReasoningSpan(start="<think>", end="</think>")
OPENED = ReasoningSpan(start="<think>", end="</think>", is_open=True)


def test_the_vocabulary_is_the_detokenizers_and_survives_packing() -> None:
    found = vocabulary()
    assert found.tokens == [tokenizer().token_bytes(i) for i in range(VOCAB)]
    assert found.special_ids == {0, 1, 2, 3}
    assert GrammarVocabulary.unpacked(found.packed()) == found


def test_a_folder_without_a_tokenizer_has_no_vocabulary(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match=r"tokenizer\.json"):
        GrammarVocabulary.load(tmp_path, VOCAB, EOS)


STYLES: list[dict[str, Any]] = [{"separators": (",", ":")}, {}, {"indent": 2}, {"indent": 4}, {"indent": "\t"}, {"ensure_ascii": False}]
PEOPLE = [
    {"name": "", "age": 0},
    {"name": 'J\u00f6rg \u2028 "x"\n', "age": -12, "tags": ["a", "bc"]},
    {"name": "a", "age": 1, "tags": []},
]
LOOSE = ['{"name":  "a","age":1}', ' {"name":"a","age":1}', '{"name":"a","age":1}\n', '{"name":"a",\n\n"age":1}', '{"name":"a"}']


@pytest.mark.parametrize("style", STYLES, ids=str)
@pytest.mark.parametrize("value", PEOPLE, ids=str)
def test_a_document_may_be_compact_usual_or_pretty(style: dict[str, Any], value: object) -> None:
    assert matches(schema(PERSON), json.dumps(value, **style))


@pytest.mark.parametrize("text", LOOSE)
def test_white_space_is_bounded_and_what_is_required_is_there(text: str) -> None:
    assert not matches(schema(PERSON), text)


def test_schemas_of_any_value() -> None:
    assert all(matches(schema(source), '[1, {"a": null}]') for source in ("{}", " { } ", "true"))
    assert matches(Grammar.json_object(), '{"a": [1]}')
    assert not matches(Grammar.json_object(), "[1]")


@pytest.mark.parametrize(
    ("source", "taken", "refused"),
    [
        ("a/b", "a/b", "ab"),
        (r"a\/b", "a/b", "ab"),
        ("a\nb", "a\nb", "a b"),
        ("[/]+", "//", "a"),
        (r"a\\/", "a\\/", "a/"),
        ("^ab$", "ab", "abc"),
        ("a|bc", "bc", "ac"),
        (r"\d{4}-\d{2}", "2024-05", "2024-5"),
        (".", "\u00e9", "\n"),
        ("[^a]", "\n", "a"),
        ("(?i)ja", "JA", "no"),
    ],
)
def test_a_regular_expression_describes_the_whole_output(source: str, taken: str, refused: str) -> None:
    assert matches(regex(source), taken)
    assert not matches(regex(source), refused)


def test_choices_and_rules() -> None:
    assert matches(Grammar.choice(['a "b"', "c\n"]), "c\n")
    for taken in ("a", "ab", "\U0001f600"):
        assert matches(Grammar.choice(["abc", "ab", "a", "\U0001f600"]), taken)
    assert matches(Grammar.choice([f"label {number}" for number in range(5000)]), "label 4999")
    nested = lark('start: "(" start ")" | "x"')
    assert matches(nested, "((x))")
    assert not matches(nested, "((x)")


@pytest.mark.parametrize("kind", ["json", "regex"])
def test_a_grammar_binds_after_reasoning(kind: str) -> None:
    source, answer = (PERSON, '{"name": "a", "age": 1}') if kind == "json" else ("x+", "xx")
    named = GrammarKind.JSON_SCHEMA if kind == "json" else GrammarKind.REGEX
    either, opened = Grammar(named, source, THOUGHT), Grammar(named, source, OPENED)
    assert matches(either, answer)
    assert matches(either, f"<think>so { {} } </thin </think>{answer}")
    assert not matches(either, f"so</think>{answer}")
    assert not matches(either, f"<think>so {answer}")
    assert matches(opened, f"so\n</think>{answer}")
    assert not matches(opened, answer)
    assert not matches(opened, f"so</think>more</think>{answer}"), "the first end marker ends the reasoning"
    assert matches(opened, f"so</think>\n\n{answer}") is (kind == "json")


def test_markers_may_be_control_tokens() -> None:
    grammar = Grammar(GrammarKind.REGEX, "x", ReasoningSpan(start="<|im_start|>", end="<|pad|>"))
    matcher = compile_grammar(trie(), grammar)
    assert matcher.consume_tokens([1, *encode("any <|pad|> text"), 3, *encode("x")])
    assert matcher.is_accepting()


def test_a_control_token_is_no_text() -> None:
    assert not mask_of(compile_grammar(trie(), regex("(?s:.*)")))[[1, 3]].any()


GRAMMARS = {
    "schema": schema(PERSON),
    "any": schema("{}"),
    "bounded": schema('{"type":"array","minItems":1,"maxItems":3,"items":{"type":"string","maxLength":4,"pattern":"^[a-z]*$"}}'),
    "regex": regex("([a-z]{1,3}[0-9]?,)*end"),
    "choice": Grammar.choice(["yes", "yes, but", "no"]),
    "lark": lark('start: item ("," item)*\nitem: NUMBER | "[" start "]"\nNUMBER: /[0-9]+/'),
    "ambiguous": lark('start: s\ns: s s | "ab" | "a" | "b"'),
    "thought": Grammar(GrammarKind.REGEX, "[0-9]+", THOUGHT),
    "control": Grammar(GrammarKind.REGEX, "[0-9]+", ReasoningSpan(start="<think>", end="<|pad|>", is_open=True)),
}


@pytest.mark.parametrize("name", GRAMMARS)
def test_a_mask_allows_a_token_exactly_where_the_matcher_takes_it(name: str) -> None:
    """Along outputs drawn at random; the end tokens are allowed where the output is complete."""
    draw = random.Random(name)
    matcher = compile_grammar(trie(), GRAMMARS[name])
    for step in range(12):
        mask = mask_of(matcher)
        taken = np.array([matcher.deep_copy().try_consume_tokens([i]) == 1 for i in range(VOCAB)])
        taken[list(EOS)] = matcher.is_accepting()
        assert (mask == taken).all(), (step, np.flatnonzero(mask != taken))
        if matcher.is_stopped():
            assert set(np.flatnonzero(mask)) == set(EOS)
            break
        going_on = np.setdiff1d(np.flatnonzero(mask), EOS)
        assert matcher.consume_token(int(draw.choice(going_on.tolist())))


def test_the_bits_beyond_a_vocabulary_are_clear() -> None:
    whole = vocabulary()
    padded = GrammarVocabulary([*whole.tokens[:1000], b"", b"", b""], frozenset({0, 1, 2, 3}), EOS)
    matcher = compile_grammar(TokenTrie(padded), lark("start: <[*]>*"))
    bits = np.unpackbits(np.frombuffer(matcher.compute_bitmask(), dtype=np.uint8), bitorder="little")
    assert bits[:1000].all()
    assert not bits[1003:].any()


def test_tokens_of_equal_bytes_are_allowed_together_and_ids_without_a_token_never() -> None:
    """A vocabulary may spell a byte twice, as `<0x20>` and as a word's space; the model's may be larger than the tokenizer's."""
    tokens = [b"</s>", b"a", b" ", b" ", b"", b"a", b" a", "\u00e9".encode(), b"\xc3", b"\xa9"]
    made = TokenTrie(GrammarVocabulary(tokens, frozenset({0}), (0,)))
    allowed = {
        source: {i for i in range(len(tokens)) if compile_grammar(made, regex(source)).try_consume_tokens([i])}
        for source in (" a", "a", "\u00e9", "(?s:.*)")
    }
    assert allowed == {" a": {2, 3, 6}, "a": {1, 5}, "\u00e9": {7, 8}, "(?s:.*)": {0, 1, 2, 3, 5, 6, 7, 8}}


REFUSED = [
    (schema("{"), "a JSON schema as JSON text"),
    (schema("[1]"), "an object, or true, got [1]"),
    (schema("false"), "a JSON schema that a value can satisfy"),
    (schema('{"minimum":NaN}'), "NaN is not a JSON number"),
    (schema('{"items":' * 3000 + "{}" + "}" * 3000), f"at most {MAX_JSON_DEPTH} levels"),
    (schema('{"items":' * MAX_JSON_DEPTH + "{}" + "}" * MAX_JSON_DEPTH), f"at most {MAX_JSON_DEPTH} levels"),
    (schema('{"x-guidance":{"lenient":true}}'), 'the keywords of JSON Schema, got "x-guidance"'),
    (schema('{"type":"object","dependentRequired":{"a":["b"]}}'), 'that are supported, got "dependentRequired"'),
    (schema('{"type":"string","format":"idn-email"}'), 'a format of JSON Schema that is supported, got "idn-email"'),
    (schema('{"oneOf":[{"type":"object"},{"type":"object","required":["a"]}]}'), "Use anyOf"),
    (schema('{"$ref":"https://example.com/a.json"}'), 'a part of the same schema, got "https://example.com/a.json". Put what'),
    (schema('{"$ref":"file:///etc/passwd"}'), 'a part of the same schema, got "file:///etc/passwd"'),
    (
        schema('{"type":"object","required":["a"],"propertyNames":{"pattern":"^b"}}'),
        "required property 'a' is unsatisfiable. Allow it in properties, propertyNames, patternProperties or additionalProperties.",
    ),
    (
        lark('start: "x" %json {"pattern":"("}'),
        'grammar: expected a regular expression of ECMAScript whose parentheses are balanced, got "(". See #/pattern.',
    ),
    (regex("(?=a)b"), "compiled. Look-around, including look-ahead and look-behind, is not supported."),
    (regex("a" * 5000 + "(?=a)"), "compiled. Look-around, including"),
    (regex("(a"), "compiled. Unclosed group."),
    (regex(r"\bfoo"), "compiled. lookarounds not supported"),
    (lark("start: nothing"), 'expected a grammar that can be compiled. at 1(8): unknown name: "nothing"'),
    (lark('rule: "a"'), "no start rule"),
    (lark('start: A\nA: "a" A'), "circular reference"),
]


@pytest.mark.parametrize(("grammar", "said"), REFUSED, ids=[said for _, said in REFUSED])
def test_what_cannot_be_compiled_is_refused_by_name(grammar: Grammar, said: str) -> None:
    with pytest.raises(InvalidRequest) as caught:
        compiled(grammar)
    assert caught.value.field == "grammar"
    assert said in str(caught.value)
    assert len(str(caught.value)) < 600


def test_a_schema_of_the_greatest_depth_is_compiled() -> None:
    deepest = schema('{"items":' * (MAX_JSON_DEPTH - 1) + "{}" + "}" * (MAX_JSON_DEPTH - 1))
    assert compiled(deepest)
    assert matches(deepest, "[[[1]]]")
