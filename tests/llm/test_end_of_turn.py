"""Tests a fine-tune whose end of turn stands in its tokenizer alone: answers end at it everywhere."""

from __future__ import annotations

import json
import shutil
from collections.abc import Iterator
from typing import Any

import pytest
from grammar_kit import vetting_here

from headrace import LLM, SamplingParams
from headrace import StructuredOutputsParams as Outputs
from headrace.bundled import DEFAULT_MODEL, bundled_path
from headrace.llm.outputs import CompletionOutput

pytestmark = pytest.mark.socket

TURN_END = 2
"""`<|im_end|>`. The base model's end of text is 0."""


@pytest.fixture(scope="module")
def llm(tmp_path_factory: pytest.TempPathFactory) -> Iterator[LLM]:
    bundled, folder = bundled_path(DEFAULT_MODEL), tmp_path_factory.mktemp("fine-tune") / "model"
    assert bundled is not None
    shutil.copytree(bundled, folder)
    for file in ("config.json", "generation_config.json"):
        fields = json.loads((folder / file).read_text()) | {"eos_token_id": 0}
        (folder / file).write_text(json.dumps(fields))
    with vetting_here(), LLM(folder, dtype="float32", num_gpu_blocks_override=100, max_num_seqs=2, num_threads=1) as llm:
        yield llm


def answer(llm: LLM, **changes: Any) -> CompletionOutput:
    params = SamplingParams(**{"temperature": 0.0, "max_tokens": 40, **changes})
    (found,) = llm.chat([{"role": "user", "content": "What is the capital of France?"}], params, use_tqdm=False)
    return found.outputs[0]


def test_the_turn_ends_the_answer(llm: LLM) -> None:
    found = answer(llm)
    assert (found.finish_reason, found.stop_reason) == ("stop", None)
    assert list(found.token_ids).index(TURN_END) == len(found.token_ids) - 1
    assert "<|im_end|>" not in found.text


def test_parameters_that_concern_end_tokens_concern_it(llm: LLM) -> None:
    plain = answer(llm)
    ignored = answer(llm, ignore_eos=True)
    assert (ignored.finish_reason, len(ignored.token_ids)) == ("length", 40)
    assert ignored.token_ids[: len(plain.token_ids)] == plain.token_ids
    longer = answer(llm, min_tokens=len(plain.token_ids) + 3)
    assert TURN_END not in longer.token_ids[: len(plain.token_ids) + 3]
    shown = answer(llm, include_stop_str_in_output=True, skip_special_tokens=False)
    assert shown.text == plain.text + "<|im_end|>"


def test_a_grammar_may_end_with_it(llm: LLM) -> None:
    found = answer(llm, structured_outputs=Outputs(choice=["Paris", "Rome"]))
    assert found.finish_reason == "stop"
    assert found.text in ("Paris", "Rome")
    assert found.token_ids[-1] in (0, TURN_END)
