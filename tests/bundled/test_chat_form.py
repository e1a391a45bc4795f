"""Tests the shipped chat template and tokenizer: tool form, single digits, and any text survives."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from headrace.text.output.formats import AUTO, tool_format

transformers = pytest.importorskip("transformers")

pytestmark = pytest.mark.pure

TINY = Path(__file__).parents[2] / "src" / "headrace" / "bundled" / "headrace-tiny"
TOOL = {"type": "function", "function": {"name": "search", "description": "Search.", "parameters": {"type": "object", "properties": {}}}}
CALL = {"type": "function", "function": {"name": "search", "arguments": {"query": "mill wheel"}}}
CONVERSATION: list[dict[str, Any]] = [
    {"role": "system", "content": "Be short."},
    {"role": "user", "content": "Search for mill wheel."},
    {"role": "assistant", "content": "", "tool_calls": [CALL, CALL]},
    {"role": "tool", "content": '{"title": "wheel"}'},
    {"role": "assistant", "content": "I found: wheel."},
    {"role": "user", "content": "Thanks"},
]
RENDERED = """<|im_start|>system
Be short.

You may call these functions:
<tools>
{"type": "function", "function": {"name": "search", "description": "Search.", "parameters": {"type": "object", "properties": {}}}}
</tools><|im_end|>
<|im_start|>user
Search for mill wheel.<|im_end|>
<|im_start|>assistant
<tool_call>
{"name": "search", "arguments": {"query": "mill wheel"}}
</tool_call>
<tool_call>
{"name": "search", "arguments": {"query": "mill wheel"}}
</tool_call><|im_end|>
<|im_start|>tool
<tool_response>
{"title": "wheel"}
</tool_response><|im_end|>
<|im_start|>assistant
I found: wheel.<|im_end|>
<|im_start|>user
Thanks<|im_end|>
<|im_start|>assistant
"""


@pytest.fixture(scope="module")
def tokenizer() -> Any:
    return transformers.AutoTokenizer.from_pretrained(TINY)


def test_template_renders_tools_calls_and_results_in_hermes_form(tokenizer: Any) -> None:
    assert tokenizer.apply_chat_template(CONVERSATION, tools=[TOOL], add_generation_prompt=True, tokenize=False) == RENDERED


def test_template_takes_arguments_as_the_json_string_of_the_api(tokenizer: Any) -> None:
    call = {"type": "function", "function": {"name": "search", "arguments": '{"query": "mill wheel"}'}}
    messages = [*CONVERSATION[:2], {"role": "assistant", "content": None, "tool_calls": [call, call]}, *CONVERSATION[3:]]
    assert tokenizer.apply_chat_template(messages, tools=[TOOL], add_generation_prompt=True, tokenize=False) == RENDERED


def test_template_adds_no_system_turn_of_its_own(tokenizer: Any) -> None:
    messages = [{"role": "user", "content": "Hi"}]
    assert tokenizer.apply_chat_template(messages, tokenize=False) == "<|im_start|>user\nHi<|im_end|>\n"


def test_the_template_names_the_form_of_calls_that_is_parsed() -> None:
    row = tool_format(AUTO, [(TINY / "chat_template.jinja").read_text()])
    assert row is not None
    assert row.name == "hermes"


def test_digits_are_single_tokens_and_any_text_survives(tokenizer: Any) -> None:
    assert [tokenizer.decode([i]) for i in tokenizer("4096", add_special_tokens=False)["input_ids"]] == list("4096")
    text = "Gr\u00fc\u00dfe, \u4e16\u754c! \t\n  x = 10\r\n\U0001f642"
    assert tokenizer.decode(tokenizer(text, add_special_tokens=False)["input_ids"]) == text


def test_control_tokens_are_special_and_tool_markers_are_shown(tokenizer: Any) -> None:
    ids = tokenizer("<tool_call>a</tool_call><|im_end|>", add_special_tokens=False)["input_ids"]
    assert tokenizer.decode(ids, skip_special_tokens=True) == "<tool_call>a</tool_call>"
    assert tokenizer.eos_token == "<|im_end|>"
    assert tokenizer.pad_token == "<|pad|>"
