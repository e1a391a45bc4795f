"""Tests that training texts are what the shipped chat template renders and what the product's parser reads."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from headrace.text.output.formats import AUTO, tool_format
from headrace.text.output.parser import OutputParser
from tools.train_tiny.chat import content_text
from tools.train_tiny.corpus import held_out_examples

transformers = pytest.importorskip("transformers")

pytestmark = pytest.mark.pure

TINY = Path(__file__).parents[2] / "src" / "headrace" / "bundled" / "headrace-tiny"
CALL = {"type": "function", "function": {"name": "search", "arguments": {"query": "mill wheel"}}}
TWO_CALLS: dict[str, Any] = {"role": "assistant", "content": "", "tool_calls": [CALL, CALL]}


@pytest.fixture(scope="module")
def tokenizer() -> Any:
    return transformers.AutoTokenizer.from_pretrained(TINY)


def test_corpus_renders_as_the_template_does(tokenizer: Any) -> None:
    for examples in held_out_examples(4).values():
        for example in examples:
            prompt = tokenizer.apply_chat_template(
                example.messages[:-1], tools=example.tools or None, add_generation_prompt=True, tokenize=False
            )
            assert prompt == example.prompt()


def test_calls_of_the_corpus_are_parsed_by_the_format_that_the_template_asks_for() -> None:
    """The arguments as the model is taught to write them, and nothing beside the calls."""
    row = tool_format(AUTO, [(TINY / "chat_template.jinja").read_text()])
    assert row is not None
    assert row.name == "hermes"
    for message in (TWO_CALLS, *(example.messages[-1] for example in held_out_examples(8)["tool_call"])):
        parser = OutputParser(row, None)
        deltas = [parser.push(content_text(message)), parser.finish()]
        pieces = [piece for delta in deltas for piece in delta.tool_calls]
        functions = [call["function"] for call in message["tool_calls"]]
        assert "".join(delta.text for delta in deltas) == ""
        assert [piece.name for piece in pieces if piece.name is not None] == [function["name"] for function in functions]
        for number, function in enumerate(functions):
            assert "".join(piece.arguments for piece in pieces if piece.number == number) == json.dumps(function["arguments"])
