"""Tests grammars of forced calls, compiled by llguidance for a vocabulary of bytes and the format's markers."""

from __future__ import annotations

import json
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import Any

import hostile_tools
import llguidance
import pytest
import text_kit
from counted_lines import num_lines

from headrace.core.errors import InvalidRequest
from headrace.core.grammar import Grammar, GrammarKind
from headrace.core.tools import CallMode, FunctionTool, ToolChoice
from headrace.text.output.forced import forced_grammar
from headrace.text.output.format_types import CallSyntax, ToolFormat
from headrace.text.output.formats import TOOL_FORMATS
from headrace.text.output.parser import OutputParser

pytestmark = pytest.mark.pure

MAX_LINES = 2_000_000
"""Lines of Python that the worst functions of a request may take; these take a fifth of it. About half a second."""

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
    "minimax": [("<tool_calls>\n{}\n</tool_calls>", "\n")],
    "qwen3_coder": [("<tool_call>\n{}\n</tool_call>", "\n")],
    "glm45": [("<tool_call>{}</tool_call>", "\n")],
    "minimax_m2": [("<minimax:tool_call>\n{}\n</minimax:tool_call>", "\n")],
    "deepseek_v31": [("<\uff5ctool\u2581calls\u2581begin\uff5c>{}<\uff5ctool\u2581calls\u2581end\uff5c>", "")],
    "deepseek_v3": [("<\uff5ctool\u2581calls\u2581begin\uff5c>{}<\uff5ctool\u2581calls\u2581end\uff5c>", "\n")],
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
    bodies = [written_body(row, name, arguments) for name, arguments in calls]
    around, between = WRITTEN[row.name][0]
    if row.name in ("hermes", "qwen3_coder", "glm45"):
        return between.join([around.replace("{}", body) for body in bodies])
    return around.replace("{}", between.join(bodies))


def written_body(row: ToolFormat, name: str, arguments: str) -> str:
    tags = row.tags
    if tags is None:
        return f'{{"name": "{name}", "{row.arguments_key}": {arguments}}}'
    if not tags.key_start:
        return f"{tags.call_start}{name}{tags.name_end}{arguments}{tags.call_end}"
    values = {key: value if isinstance(value, str) else json.dumps(value) for key, value in json.loads(arguments).items()}
    inside = [f"{tags.key_start}{key}{tags.key_end}{tags.value_start}{value}{tags.value_end}" for key, value in values.items()]
    return f"{tags.call_start}{name}{tags.name_end}{''.join(inside)}{tags.call_end}"


def takes(vocabulary: llguidance.LLTokenizer, grammar: Grammar | None, text: str, *, spelled: bool = True) -> bool:
    """Whether the whole text is taken, and may end there. spelled: byte by byte, so that no token stands for a marker."""
    assert grammar is not None
    assert grammar.kind is GrammarKind.LARK
    matcher = llguidance.LLMatcher(vocabulary, llguidance.LLMatcher.grammar_from_lark(grammar.source))
    assert not matcher.is_error(), matcher.get_error()
    data = text.encode()
    ids = [token for byte in data for token in vocabulary.tokenize_bytes(bytes([byte]))] if spelled else vocabulary.tokenize_str(text)
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


TAGGED = [row for row in FORCIBLE if row.tags is not None and row.tags.key_start]
STRINGS = FunctionTool(
    name="note",
    parameters={
        "type": "object",
        "properties": {
            "text": {"type": "string", "description": "any"},
            "kind": {"enum": ["a", "b"]},
            "by": {"anyOf": [{"type": "string"}, {"type": "null"}]},
            "mood": {"anyOf": [{"enum": ["good"], "type": "string"}, {"type": "null"}]},
            "tags": {"type": "array", "items": {"type": "string"}},
        },
        "required": ["text", "kind"],
    },
    is_strict=True,
)


@pytest.mark.parametrize("row", TAGGED, ids=lambda row: row.name)
def test_strings_between_tags_follow_their_schema_and_are_read_as_they_were_written(
    vocabulary: llguidance.LLTokenizer, row: ToolFormat
) -> None:
    grammar = forced_grammar(row, [STRINGS], REQUIRED)
    good = {"text": 'say "5"\n<b>\u00e9</b>', "kind": "b", "by": "5", "mood": None, "tags": ["x", "y z"]}

    for arguments in (good, {"text": "", "kind": "a"}, {"text": "12", "kind": "a", "by": None}):
        said = written(row, ("note", json.dumps(arguments)))
        assert takes(vocabulary, grammar, said)
        parser = OutputParser(row, None, functions=[STRINGS])
        pieces = [piece for char in said for piece in parser.push(char).tool_calls]
        assert json.loads("".join([piece.arguments for piece in pieces])) == arguments
    for wrong in ({**good, "kind": "c"}, {**good, "mood": "bad"}, {**good, "tags": "x"}, {"kind": "a"}, {**good, "more": 1}):
        assert not takes(vocabulary, grammar, written(row, ("note", json.dumps(wrong))))


@pytest.mark.parametrize(
    ("parameters", "field"),
    [
        ({"properties": {"s": {"type": "string", "pattern": "a+"}}}, "properties.s.pattern"),
        ({"properties": {"s": {"anyOf": [{"type": "string", "maxLength": 3}, {"type": "null"}]}}}, "properties.s.maxLength"),
        ({"properties": {"s": {"anyOf": [{"type": "string"}, {"type": "integer"}]}}}, "properties.s"),
        ({"properties": {"s": {"enum": ["1", 1]}}}, "properties.s"),
        ({"properties": {"a<b": {"type": "integer"}}}, "properties"),
        ({"properties": {"s": False}}, "properties.s"),
        ({"minProperties": 1}, "minProperties"),
    ],
)
def test_rules_of_strings_that_tags_cannot_hold_are_refused_by_name(parameters: dict[str, Any], field: str) -> None:
    tool = FunctionTool(name="f", parameters={"type": "object", **parameters})
    with pytest.raises(InvalidRequest) as refused:
        forced_grammar(TOOL_FORMATS["qwen3_coder"], [FIND, tool], REQUIRED)

    assert refused.value.field == f"tools[1].function.parameters.{field}"
    assert forced_grammar(TOOL_FORMATS["hermes"], [FIND, tool], REQUIRED) is not None
    assert forced_grammar(TOOL_FORMATS["qwen3_coder"], [FIND, tool], AUTO) is not None


def test_keywords_without_an_effect_are_no_rules_between_tags() -> None:
    plain: dict[str, Any] = {"type": "object", "properties": {"s": {"type": "string"}, "t": {"enum": ["a"]}}, "required": ["s"]}
    idle = {"format": "path", "minLength": 0, "x-order": 1, "allOf": [], "not": False, "minimum": 5, "contentEncoding": "base64"}
    noted = {**plain, "properties": {"s": {"type": "string", **idle}, "t": {"enum": ["a"], "format": "password", "example": "a"}}}
    noted |= {"propertyNames": {"type": "string"}, "unevaluatedProperties": True, "dependentRequired": {}, "x-tool": 1, "minProperties": 0}
    for row in TAGGED:
        made = [forced_grammar(row, [FunctionTool(name="f", parameters=parameters)], REQUIRED) for parameters in (plain, noted)]
        assert made[0] == made[1]
    for name, rule in (("minProperties", 1), ("unevaluatedProperties", False), ("propertyNames", {"maxLength": 1})):
        with pytest.raises(InvalidRequest, match=name):
            forced_grammar(TOOL_FORMATS["qwen3_coder"], [FunctionTool(name="f", parameters={**plain, name: rule})], REQUIRED)
    strict = {**plain, "properties": {"s": {"type": "string", "format": "uuid"}}}
    with pytest.raises(InvalidRequest, match=r"properties\.s\.format"):
        forced_grammar(TOOL_FORMATS["qwen3_coder"], [FunctionTool(name="f", parameters=strict)], REQUIRED)


@pytest.mark.parametrize("row", [row for row in FORCIBLE if row.tags is not None], ids=lambda row: row.name)
def test_tags_may_be_the_tokens_that_they_are(tmp_path: Path, row: ToolFormat) -> None:
    document: dict[str, Any] = json.loads((text_kit.save_byte_level(tmp_path) / "tokenizer.json").read_text())
    first = 1 + max([*document["model"]["vocab"].values(), *[token["id"] for token in document["added_tokens"]]])
    ids = {marker: first + number for number, marker in enumerate(row.markers)}
    added = [{**document["added_tokens"][0], "id": token_id, "content": marker, "special": True} for marker, token_id in ids.items()]
    document["added_tokens"] += added
    (tmp_path / "tokenizer.json").write_text(json.dumps(document))
    vocabulary = llguidance.LLTokenizer(str(tmp_path / "tokenizer.json"))

    for choice in (REQUIRED, AUTO):
        known = forced_grammar(row, [FIND, LOOSE], choice, token_ids=ids)
        for text in (written(row, ("find", GOOD)), written(row, ("find", GOOD), ("find", GOOD))):
            assert takes(vocabulary, known, text, spelled=False)
            assert takes(vocabulary, known, text)
        assert not takes(vocabulary, known, written(row, ("find", BAD)), spelled=False)


def test_schemas_that_refer_to_themselves_are_refused_at_once() -> None:
    """Each of 16 definitions has 64 branches that refer to the next: following them all would never end."""
    definitions: dict[str, Any] = {f"d{n}": {"anyOf": [{"$ref": f"#/$defs/d{n + 1}"}] * 64} for n in range(16)}
    definitions |= {"d16": {"type": "string"}, "loop": {"$ref": "#/$defs/loop"}}
    definitions |= {f"c{n}": {"$ref": f"#/$defs/c{n + 1}"} for n in range(4000)} | {"big": {"enum": [["x" * 1000] * 100]}}
    schemas: list[dict[str, Any]] = [{"$ref": "#/$defs/d0"}, {"$ref": "#/$defs/loop"}, {"$ref": "#/$defs/c0"}]

    def refuse(schema: dict[str, Any]) -> None:
        tool = FunctionTool(name="f", parameters={"type": "object", "properties": {"s": schema}, "$defs": definitions})
        with pytest.raises(InvalidRequest) as refused:
            forced_grammar(TOOL_FORMATS["qwen3_coder"], [tool], REQUIRED)
        assert refused.value.field == "tools[0].function.parameters.properties.s"
        OutputParser(TOOL_FORMATS["qwen3_coder"], None, functions=[tool]).push("<tool_call><function=f><parameter=s>")

    assert sum(num_lines(partial(refuse, schema)) for schema in schemas) < MAX_LINES
    wide = {"type": "object", "properties": {f"p{n}": {"$ref": "#/$defs/big"} for n in range(1000)}, "$defs": definitions}
    with pytest.raises(InvalidRequest) as too_large:
        forced_grammar(TOOL_FORMATS["qwen3_coder"], [FunctionTool(name="f", parameters=wide)], REQUIRED)

    assert "bytes of grammar" in too_large.value.limit


@pytest.mark.parametrize("row", TAGGED, ids=lambda row: row.name)
def test_hostile_schemas_are_refused_or_written_with_little_work(row: ToolFormat) -> None:
    for name, given in hostile_tools.requests().items():
        tools = [FunctionTool(name=tool["function"]["name"], parameters=tool["function"].get("parameters")) for tool in given]

        def write(tools: list[FunctionTool] = tools) -> None:
            with suppress(InvalidRequest):
                forced_grammar(row, tools, REQUIRED)

        assert num_lines(write) < MAX_LINES, name
