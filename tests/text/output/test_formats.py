"""Tests the table of output formats: which row a template or a name chooses, and that no marker begins within another."""

from __future__ import annotations

import pytest

from headrace.core.errors import ConfigError
from headrace.core.grammar import MAX_MARKER_CHARS
from headrace.text.output.formats import ALIASES, REASONING_FORMATS, TOOL_FORMATS, reasoning_format, tool_format

pytestmark = pytest.mark.pure

DEEPSEEK = "<\uff5ctool\u2581calls\u2581begin\uff5c><\uff5ctool\u2581call\u2581begin\uff5c>"
QWEN3 = "{%- if tools %}<tools></tools><tool_call>{}</tool_call>{% endif %}{% if '</think>' in content %}"


@pytest.mark.parametrize(
    ("template", "tools", "reasoning"),
    [
        ("<|im_start|>{{ message.role }}", None, None),
        ("<tools>\n<tool_call>\n{...}\n</tool_call>", "hermes", None),
        (QWEN3, "hermes", "qwen3"),
        ("<tool_call>\n<function=name>\n<parameter=a>", "qwen3_coder", None),
        ("<tool_call>{function-name}\n<arg_key>{arg-key-1}</arg_key> <think></think>", "glm45", "qwen3"),
        ("{%- set toolcall_begin_token = '<minimax:tool_call>' -%}<invoke name= </think>", "minimax_m2", "qwen3"),
        ('\'<tool_calls>\\n{"name": <tool-name>, "arguments": <args-json-object>}\\n...\\n</tool_calls>', "minimax", None),
        ("<tool_calls>[{}]</tool_calls>", "jamba", None),
        (DEEPSEEK + "' + tool['type'] + '<\uff5ctool\u2581sep\uff5c>' + tool['function']['name'] + '\\n' + '```json'", "deepseek_v3", None),
        (DEEPSEEK + "tool_call_name<\uff5ctool\u2581sep\uff5c>tool_call_arguments </think>", "deepseek_v31", "qwen3"),
        ("<|start|>assistant<|channel|>commentary to=functions.name <|constrain|>json<|message|>", None, None),
        ("<|python_tag|>{{ call }}", "llama3_json", None),
        ('Respond in the format {"name": function name, "parameters": dictionary of argument name and its value}.', "llama3_json", None),
        ("[TOOL_CALLS][{{ call }}]", "mistral", None),
        ("[TOOL_CALLS]{{ name }}[ARGS]{{ arguments }} [THINK][/THINK]", "mistral_named", "mistral"),
        ("<|python_start|>[f()]<|python_end|><|python_tag|>", "llama4_pythonic", None),
        ("[func_name1(params_name1=params_value1)]", "pythonic", None),
        ("<|tool_call|>", "granite", None),
    ],
)
def test_the_template_chooses_the_row(template: str, tools: str | None, reasoning: str | None) -> None:
    found, reasons = tool_format("auto", [template]), reasoning_format("auto", [template])

    assert (found and found.name, reasons and reasons.name) == (tools, reasoning)


def test_a_name_chooses_its_row_whatever_the_template_says() -> None:
    assert tool_format("pythonic", [QWEN3]) is TOOL_FORMATS["pythonic"]
    assert tool_format("mistral", ["[TOOL_CALLS]"]) is TOOL_FORMATS["mistral"]
    assert tool_format("mistral", ["[TOOL_CALLS]f[ARGS]"]) is TOOL_FORMATS["mistral_named"]
    assert tool_format("llama4_json", []) is TOOL_FORMATS["llama3_json"]
    assert reasoning_format("deepseek_r1", [QWEN3]) is REASONING_FORMATS["deepseek_r1"]
    assert tool_format("deepseek_v3", []) is TOOL_FORMATS["deepseek_v3"]
    assert tool_format("glm47", []) is TOOL_FORMATS["glm45"]
    assert reasoning_format("deepseek_v3", []) is REASONING_FORMATS["qwen3"]
    assert tool_format("none", [QWEN3]) is None
    assert reasoning_format("none", [QWEN3]) is None


def test_an_unknown_name_is_refused_with_the_known_ones() -> None:
    with pytest.raises(ConfigError) as tools:
        tool_format("hermès", [], where="models[0].tool_call_parser")
    with pytest.raises(ConfigError) as reasoning:
        reasoning_format("hermes", [])

    assert "models[0].tool_call_parser" in str(tools.value)
    assert "hermes, llama3_json" in str(tools.value)
    assert "deepseek_r1" in str(reasoning.value)


def test_names_are_those_of_the_rows_and_aliases_lead_to_them() -> None:
    assert all(name == row.name for rows in (TOOL_FORMATS, REASONING_FORMATS) for name, row in rows.items())
    assert all(target in TOOL_FORMATS or target in REASONING_FORMATS for target in ALIASES.values())


def test_no_marker_begins_within_another() -> None:
    """Then the leftmost marker is found the same way however a text is split."""
    rows = [(*row.markers, reason.start, reason.end) for row in TOOL_FORMATS.values() for reason in REASONING_FORMATS.values()]
    for markers in rows:
        for marker in markers:
            assert len(marker) <= MAX_MARKER_CHARS
            assert not any(marker[1:].startswith(other[:1]) or other[0] in marker[1:] for other in markers if other != marker)


def test_reasoning_is_opened_by_the_end_of_the_prompt_alone() -> None:
    row = REASONING_FORMATS["qwen3"]

    assert row.is_opened_by("<|im_start|>assistant\n<think>\n")
    assert not row.is_opened_by("what is <think>?<|im_end|>\n<|im_start|>assistant\n")
    assert not row.is_opened_by("<|im_start|>assistant\n<think>\n\n</think>\n\n")
    assert row.span(is_open=False).is_open is False
    assert REASONING_FORMATS["deepseek_r1"].span(is_open=False).is_open is True
