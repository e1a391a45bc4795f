"""Tests answers of the bundled model that have to match: each form of `StructuredOutputsParams`, alone and beside other parameters."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from typing import Any

import pytest
from grammar_kit import vetting_here
from grammar_samples import is_document

from headrace import LLM, SamplingParams
from headrace import StructuredOutputsParams as Outputs
from headrace.core.errors import InvalidRequest
from headrace.llm.outputs import CompletionOutput

pytestmark = pytest.mark.socket

CITY = {
    "type": "object",
    "properties": {"city": {"type": "string", "maxLength": 12}, "people": {"type": "integer", "minimum": 0, "maximum": 99999}},
    "required": ["city", "people"],
    "additionalProperties": False,
}
PROMPT = "Tell me something about a city."


@pytest.fixture(scope="module")
def llm() -> Iterator[LLM]:
    with vetting_here(), LLM(dtype="float32", num_gpu_blocks_override=400, max_num_seqs=8, num_threads=1) as llm:
        yield llm


def answers(llm: LLM, outputs: Outputs, **changes: Any) -> list[CompletionOutput]:
    params = SamplingParams(**{"seed": 5, "max_tokens": 80, **changes}, structured_outputs=outputs)
    (found,) = llm.generate(PROMPT, params, use_tqdm=False)
    return found.outputs


@pytest.mark.parametrize(
    ("outputs", "expression"),
    [
        (Outputs(regex="[A-Z][a-z]{2,9}!"), "[A-Z][a-z]{2,9}!"),
        (Outputs(choice=["Paris", "Rome", "New York"]), "Paris|Rome|New York"),
        (Outputs(grammar='start: WORD ("," WORD){0,3}\nWORD: /[a-z]{1,5}/'), "[a-z]{1,5}(,[a-z]{1,5}){0,3}"),
        (Outputs(grammar='root ::= "(" [a-z]+ ")" | digits\ndigits ::= [0-9] [0-9]'), r"\([a-z]+\)|[0-9]{2}"),
    ],
    ids=["regex", "choice", "Lark", "GBNF"],
)
@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_the_whole_answer_matches(llm: LLM, outputs: Outputs, expression: str, temperature: float) -> None:
    (answer,) = answers(llm, outputs, temperature=temperature)
    assert answer.finish_reason == "stop"
    assert re.fullmatch(expression, answer.text), answer.text


def test_a_schema_gives_documents_in_all_sequences_and_beside_other_parameters(llm: LLM) -> None:
    found = answers(llm, Outputs(json=CITY), n=4, logprobs=1, presence_penalty=0.5, min_tokens=3)
    assert len({answer.text for answer in found}) > 1
    for answer in found:
        assert answer.finish_reason == "stop"
        assert is_document(CITY, answer.text), answer.text
        assert answer.logprobs is not None
        assert len(answer.logprobs) == len(answer.token_ids)


def test_any_object_is_an_object_as_far_as_it_is_written(llm: LLM) -> None:
    """What is cut at max_tokens is cut, and says so: nothing is repaired."""
    (answer,) = answers(llm, Outputs(json_object=True), temperature=1.2)
    assert answer.text.startswith("{")
    if answer.finish_reason == "stop":
        assert isinstance(json.loads(answer.text), dict)
    (cut,) = answers(llm, Outputs(json=CITY), max_tokens=3)
    assert cut.finish_reason == "length"
    assert not is_document(CITY, cut.text)


def test_a_stop_string_ends_an_answer_inside_its_document(llm: LLM) -> None:
    (answer,) = answers(llm, Outputs(json=CITY), stop=['"people"'])
    assert (answer.finish_reason, answer.stop_reason) == ("stop", '"people"')
    assert '"people"' not in answer.text
    assert answer.text.startswith("{")


def test_prompts_with_and_without_a_grammar_are_answered_as_alone(llm: LLM) -> None:
    shapes = [Outputs(json=CITY), None, Outputs(regex="(ab|c){4,9}"), None, Outputs(choice=["yes", "no"])]
    params = [SamplingParams(seed=number, max_tokens=40, structured_outputs=shape) for number, shape in enumerate(shapes)]
    together = llm.generate([PROMPT] * len(params), params, use_tqdm=False)
    for output, each in zip(together, params, strict=True):
        (alone,) = llm.generate(PROMPT, each, use_tqdm=False)
        assert output.outputs[0].token_ids == alone.outputs[0].token_ids


@pytest.mark.parametrize(
    ("outputs", "field"),
    [
        (Outputs(regex="[a"), "structured_outputs.regex"),
        (Outputs(json={"type": "no such type"}), "structured_outputs.json"),
        (Outputs(json="{"), "structured_outputs.json"),
        (Outputs(grammar="start: missing"), "structured_outputs.grammar"),
    ],
)
def test_what_cannot_be_compiled_is_refused_by_name_and_the_next_call_runs(llm: LLM, outputs: Outputs, field: str) -> None:
    with pytest.raises(InvalidRequest) as caught:
        answers(llm, outputs)
    assert caught.value.field == field
    assert answers(llm, Outputs(choice=["still here"]))[0].text == "still here"
