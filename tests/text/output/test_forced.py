"""Grammars of forced calls, compiled by llguidance for a vocabulary of bytes and the format's markers."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import llguidance
import pytest
import text_kit

from headrace.core.errors import InvalidRequest
from headrace.core.grammar import Grammar, GrammarKind
from headrace.core.tools import CallMode, FunctionTool, ToolChoice
from headrace.text.output.forced import forced_grammar
from headrace.text.output.formats import TOOL_FORMATS, CallSyntax, ToolFormat

FIND = FunctionTool(
    name="find",
    parameters={
        "type": "object",
        "properties": {"where": {"$ref": "#/$defs/place"}, "limit": {"type": "integer"}},
        "required": ["where", "limit"],
        "additionalProperties": False,
        "$defs": {"place": {"enum": ["here", "there"]}},
    },
    is_strict=True,
)
FINDER = FunctionTool(name="finder")
LOOSE = FunctionTool(name="loose", parameters={"type": "object", "properties": {"a": {"type": "integer"}}, "required": ["a"]})
REQUIRED, AUTO = ToolChoice(mode=CallMode.REQUIRED), ToolChoice()
GOOD, BAD = '{"where": "here", "limit": 3}', '{"where": "nowhere", "limit": 3}'

WRITTEN: dict[str, list[tuple[str, str]]] = {
    "hermes": [("<tool_call>\n{}\n</tool_call>", "\n")],
    "llama3_json": [("{}", "; ")],
    "mistral": [("[TOOL_CALLS][{}]", ", ")],
    "mistral_named": [("{}", "")],
    "granite": [("<|tool_call|>[{}]", ", ")],
    "jamba": [("<tool_calls>[{}]</tool_calls>", ", ")],
    "phi4_mini_json": [("functools[{}]", ", ")],
}
FORCIBLE = [TOOL_FORMATS[name] for name in WRITTEN]


@pytest.fixture(scope="session")
def vocabulary(tmp_path_factory: pytest.TempPathFactory) -> llguidance.LLTokenizer:
    folder = text_kit.save_byte_level(tmp_path_factory.mktemp("forced"))
    return llguidance.LLTokenizer(str(Path(folder) / "tokenizer.json"))


def written(row: ToolFormat, *calls: tuple[str, str]) -> str:
    """Calls as the family's template writes them."""
    if row.syntax is CallSyntax.NAMED:
        return "".join([f"[TOOL_CALLS]{name}[ARGS]{arguments}" for name, arguments in calls])
    bodies = [f'{{"name": "{name}", "{row.arguments_key}": {arguments}}}' for name, arguments in calls]
    around, between = WRITTEN[row.name][0]
    if row.name == "hermes":
        return between.join([around.replace("{}", body) for body in bodies])
    return around.replace("{}", between.join(bodies))


def takes(vocabulary: llguidance.LLTokenizer, grammar: Grammar | None, text: str, *, spelled: bool = True) -> bool:
    """Whether the whole text is taken, and may end there. spelled: byte by byte, so that no token stands for a marker."""
    assert grammar is not None
    assert grammar.kind is GrammarKind.LARK
    matcher = llguidance.LLMatcher(vocabulary, llguidance.LLMatcher.grammar_from_lark(grammar.source))
    assert not matcher.is_error(), matcher.get_error()
    data = text.encode()
    ids = [token for byte in data for token in vocabulary.greedy_tokenize(chr(byte))] if spelled else vocabulary.tokenize_str(text)
    taken: int = matcher.validate_tokens(ids)
    if taken < len(ids):
        return False
    return bool(matcher.consume_tokens(ids) and matcher.is_accepting())


def test_every_format_but_pythonic_ones_can_be_forced() -> None:
    assert {row.name for row in FORCIBLE} == {row.name for row in TOOL_FORMATS.values() if row.syntax is not CallSyntax.PYTHON}


@pytest.mark.parametrize("row", FORCIBLE, ids=lambda row: row.name)
def test_a_required_call_validates_and_text_is_not_allowed(vocabulary: llguidance.LLTokenizer, row: ToolFormat) -> None:
    grammar = forced_grammar(row, [FIND, FINDER], REQUIRED)

    assert takes(vocabulary, grammar, written(row, ("find", GOOD)))
    assert takes(vocabulary, grammar, written(row, ("finder", "{}")))
    assert takes(vocabulary, grammar, written(row, ("find", GOOD), ("finder", "{}"), ("find", GOOD)))
    assert not takes(vocabulary, grammar, written(row, ("find", BAD)))
    assert not takes(vocabulary, grammar, written(row, ("finder", GOOD)))
    assert not takes(vocabulary, grammar, written(row, ("fin", "{}")))
    assert not takes(vocabulary, grammar, "Hello")
    assert not takes(vocabulary, grammar, "")


@pytest.mark.parametrize("row", FORCIBLE, ids=lambda row: row.name)
def test_without_parallel_calls_there_is_one(vocabulary: llguidance.LLTokenizer, row: ToolFormat) -> None:
    grammar = forced_grammar(row, [FIND, FINDER], ToolChoice(mode=CallMode.REQUIRED, is_parallel=False))

    assert takes(vocabulary, grammar, written(row, ("find", GOOD)))
    assert not takes(vocabulary, grammar, written(row, ("find", GOOD), ("finder", "{}")))


@pytest.mark.parametrize("row", FORCIBLE, ids=lambda row: row.name)
def test_a_named_function_is_the_only_one(vocabulary: llguidance.LLTokenizer, row: ToolFormat) -> None:
    grammar = forced_grammar(row, [FIND, LOOSE], ToolChoice(mode=CallMode.REQUIRED, name="loose"))

    assert takes(vocabulary, grammar, written(row, ("loose", '{"a": 1}')))
    assert not takes(vocabulary, grammar, written(row, ("loose", "{}")))
    assert not takes(vocabulary, grammar, written(row, ("find", GOOD)))


@pytest.mark.parametrize("row", FORCIBLE, ids=lambda row: row.name)
@pytest.mark.parametrize("parallel", [True, False])
def test_a_strict_function_binds_from_the_marker_on(vocabulary: llguidance.LLTokenizer, row: ToolFormat, parallel: bool) -> None:
    grammar = forced_grammar(row, [FIND, LOOSE], ToolChoice(is_parallel=parallel))

    assert takes(vocabulary, grammar, "")
    assert takes(vocabulary, grammar, "\n It is so.")
    assert takes(vocabulary, grammar, "I know < that [without] looking.\n\n{}")
    assert takes(vocabulary, grammar, written(row, ("find", GOOD)))
    assert takes(vocabulary, grammar, written(row, ("loose", '{"b": [1, {"c": null}]}')))
    assert not takes(vocabulary, grammar, written(row, ("find", BAD)))
    assert not takes(vocabulary, grammar, written(row, ("other", "{}")))
    marked = row.start + written(row, ("find", GOOD)).removeprefix(row.start)
    assert takes(vocabulary, grammar, "Let me look. " + marked)
    assert not takes(vocabulary, grammar, "Let me look. " + marked.replace("here", "nowhere"))
    assert takes(vocabulary, grammar, written(row, ("find", GOOD), ("find", GOOD))) is parallel
    assert not takes(vocabulary, grammar, written(row, ("find", GOOD), ("find", BAD)))


def test_a_marker_may_be_the_token_that_it_is(tmp_path: Path) -> None:
    document: dict[str, Any] = json.loads((text_kit.save_byte_level(tmp_path) / "tokenizer.json").read_text())
    token_id = 1 + max([*document["model"]["vocab"].values(), *[token["id"] for token in document["added_tokens"]]])
    added = {"id": token_id, "content": "[TOOL_CALLS]", "special": True}
    document["added_tokens"].append({**document["added_tokens"][0], **added})
    (tmp_path / "tokenizer.json").write_text(json.dumps(document))
    vocabulary = llguidance.LLTokenizer(str(tmp_path / "tokenizer.json"))
    row = TOOL_FORMATS["mistral"]
    text = written(row, ("find", GOOD))

    for choice in (REQUIRED, AUTO):
        known = forced_grammar(row, [FIND], choice, token_ids={"[TOOL_CALLS]": token_id})
        assert takes(vocabulary, known, text, spelled=False)
        assert takes(vocabulary, known, text)
        assert not takes(vocabulary, known, text.replace("here", "nowhere"), spelled=False)
        assert not takes(vocabulary, known, text.replace("here", "nowhere"))
    assert token_id in vocabulary.tokenize_str(text)


def test_options_of_the_compiler_in_a_schema_change_nothing(vocabulary: llguidance.LLTokenizer) -> None:
    schema = {"type": "object", "x-guidance": {"whitespace_flexible": True, "lenient": True}}
    grammar = forced_grammar(TOOL_FORMATS["hermes"], [FunctionTool(name="f", parameters=schema)], REQUIRED)

    assert takes(vocabulary, grammar, written(TOOL_FORMATS["hermes"], ("f", '{"a": 1}')))
    assert not takes(vocabulary, grammar, written(TOOL_FORMATS["hermes"], ("f", '{ "a" : 1}')))


def test_nothing_is_forced_without_need() -> None:
    row = TOOL_FORMATS["pythonic"]

    assert forced_grammar(row, [LOOSE], AUTO) is None
    assert forced_grammar(row, [FIND], ToolChoice(mode=CallMode.NONE)) is None


@pytest.mark.parametrize(
    ("tools", "choice", "field"),
    [
        ([FIND], AUTO, "tool_choice"),
        ([LOOSE], REQUIRED, "tool_choice"),
        ([LOOSE], ToolChoice(mode=CallMode.REQUIRED, name="loose"), "tool_choice"),
    ],
)
def test_a_format_that_cannot_be_forced_says_so(tools: list[FunctionTool], choice: ToolChoice, field: str) -> None:
    with pytest.raises(InvalidRequest) as refused:
        forced_grammar(TOOL_FORMATS["pythonic"], tools, choice)

    assert refused.value.field == field
    assert "pythonic" in refused.value.limit


def test_an_unknown_name_and_arguments_that_are_no_object_are_refused() -> None:
    with pytest.raises(InvalidRequest) as unknown:
        forced_grammar(TOOL_FORMATS["hermes"], [FIND], ToolChoice(mode=CallMode.REQUIRED, name="other"))
    with pytest.raises(InvalidRequest) as no_object:
        forced_grammar(TOOL_FORMATS["hermes"], [FIND, FunctionTool(name="g", parameters={"type": "array"})], REQUIRED)

    assert unknown.value.field == "tool_choice"
    assert no_object.value.field == "tools[1].function.parameters.type"


@pytest.mark.parametrize("row", FORCIBLE, ids=lambda row: row.name)
def test_one_call_at_most_binds_functions_that_are_not_strict_as_well(vocabulary: llguidance.LLTokenizer, row: ToolFormat) -> None:
    grammar = forced_grammar(row, [LOOSE], ToolChoice(is_parallel=False))

    assert takes(vocabulary, grammar, "It is so.")
    assert takes(vocabulary, grammar, written(row, ("loose", '{"b": 1}')))
    assert not takes(vocabulary, grammar, written(row, ("loose", "{}"), ("loose", "{}")))


@pytest.mark.parametrize("row", [row for row in FORCIBLE if not row.is_bare], ids=lambda row: row.name)
def test_a_document_takes_the_place_of_free_text(vocabulary: llguidance.LLTokenizer, row: ToolFormat) -> None:
    schema = {"type": "object", "properties": {"answer": {"type": "integer"}}, "required": ["answer"], "additionalProperties": False}
    grammar = forced_grammar(row, [FIND, LOOSE], ToolChoice(), document=schema)

    assert takes(vocabulary, grammar, '{"answer": 42}')
    assert takes(vocabulary, grammar, written(row, ("find", GOOD)))
    assert takes(vocabulary, grammar, written(row, ("loose", '{"b": 1}'), ("find", GOOD)))
    assert not takes(vocabulary, grammar, '{"answer": "x"}')
    assert not takes(vocabulary, grammar, "Hello")
    assert not takes(vocabulary, grammar, written(row, ("find", BAD)))


def test_a_call_that_begins_as_a_document_does_is_refused_beside_one() -> None:
    with pytest.raises(InvalidRequest) as refused:
        forced_grammar(TOOL_FORMATS["llama3_json"], [LOOSE], AUTO, document={"type": "object"})

    assert refused.value.field == "grammar"
