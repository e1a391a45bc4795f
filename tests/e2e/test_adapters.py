"""Tests the bundled adapters from their folders to tokens: they change answers, and nothing beside them in a batch changes theirs."""

from __future__ import annotations

import random
import re
from dataclasses import replace
from typing import Any

import pytest
from real_engine import RealEngine, greedy_request, resumed_anywhere

pytest.importorskip("numba")

from headrace import LLM, LoRARequest, SamplingParams
from headrace.bundled import FOLDER as FOLDERS
from headrace.core.adapters import AdapterSource
from headrace.core.grammar import Grammar, GrammarKind
from headrace.core.ids import RequestId
from headrace.core.request import EngineRequest
from headrace.text.folder import load_text

pytestmark = pytest.mark.socket

PIRATE, SHOP = LoRARequest("pirate", 1, "pirate"), LoRARequest("hardware-shop", 2, "hardware-shop")
FOLDER = FOLDERS / "headrace-tiny"
SOURCES = tuple(AdapterSource(name=name, path=str(FOLDERS / "adapters" / name)) for name in ("pirate", "hardware-shop"))
PATHS: dict[str, dict[str, str]] = {
    "float32": {"dtype": "float32"},
    "bfloat16": {"dtype": "bfloat16"},
    "int8": {"quantization": "int8"},
    "int4": {"quantization": "int4"},
    "int8 over bfloat16 rows": {"dtype": "bfloat16", "quantization": "int8"},
    "bfloat16 KV": {"kv_cache_dtype": "bfloat16"},
    "int8 KV": {"kv_cache_dtype": "int8"},
}
SPACE: dict[str, Any] = {"deterministic": True, "enable_lora": True, "lora_modules": SOURCES, "max_loras": 2, "max_num_seqs": 16}
ALONE: dict[str, Any] = {"max_num_seqs": 1, "enable_prefix_caching": False, "max_num_batched_tokens": 2048}
CROWDED: dict[str, Any] = {"depth": 2, "num_threads": 2, "max_num_batched_tokens": 23, "num_kv_blocks": 60}
"""Prompts in chunks, prefix hits, and fewer blocks than the sequences need together."""


def requests(digests: dict[str, str]) -> list[EngineRequest]:
    """The same of the base model and of each adapter: plain, n > 1, penalties, log-probabilities."""
    tokenizer = load_text(FOLDER).tokenizer
    prompts = [tokenizer.encode(text, add_special_tokens=True) for text in ("What is the capital of France?", "A hammer costs", "Hi")]
    shapes: list[dict[str, Any]] = [
        {"logprobs": 3, "prompt_logprobs": 1},
        {"n": 2, "temperature": 1.0, "top_p": 0.9, "seed": 3, "logprobs": 1},
        {"presence_penalty": 0.6, "repetition_penalty": 1.2, "temperature": 0.8, "seed": 5},
    ]
    return [
        replace(
            greedy_request(f"{adapter} {number} {place}", prompt, **shape),
            adapter=adapter,
            adapter_digest=digests[adapter] if adapter else "",
        )
        for adapter in (None, *digests)
        for number, shape in enumerate(shapes)
        for place, prompt in enumerate(prompts)
    ]


@pytest.mark.parametrize("path", PATHS.values(), ids=PATHS)
def test_in_the_worst_company_and_resumed_the_bits_are_those_of_a_request_alone(path: dict[str, str]) -> None:
    with RealEngine(FOLDER, **{**SPACE, **path, **ALONE}) as engine:
        asked = requests(dict(engine.engine.info.adapters))
        for request in asked:
            engine.run(request)
        alone = engine.answers()
    parts, expected = resumed_anywhere(asked, alone, random.Random(1))
    with RealEngine(FOLDER, **{**SPACE, **path, **CROWDED}) as engine:
        engine.run(*asked)
        engine.run(*parts)
        assert engine.answers() == alone | expected
        assert engine.preemptions > 0
        assert sum(engine.cached.values()) > 0
    for number in range(3):
        answers = [alone[f"{adapter} {number} 0", 0].token_ids for adapter in (None, "pirate", "hardware-shop")]
        assert answers[0] != answers[1] != answers[2] != answers[0]


@pytest.mark.process
def test_a_grammar_binds_an_adapters_answer() -> None:
    with RealEngine(FOLDER, **SPACE) as engine:
        asked = [
            replace(one, request_id=RequestId(f"json {one.request_id}"), grammar=Grammar(GrammarKind.REGEX, "[0-9]{3} (cows|euros)"))
            for one in requests(dict(engine.engine.info.adapters))
            if one.params.n == 1
        ]
        asked = [replace(one, params=one.params.with_(ignore_eos=False, max_tokens=30)) for one in asked]
        engine.run(*asked)
        tokenizer = load_text(FOLDER).tokenizer
        for key, answer in engine.answers().items():
            assert re.fullmatch("[0-9]{3} (cows|euros)", tokenizer.decode(answer.token_ids, skip_special_tokens=True)), key


def test_both_adapters_change_answers_in_one_batch() -> None:
    questions = ["What is the capital of France?", "How much is a hammer?"]
    asked = [(question, lora) for question in questions for lora in (None, PIRATE, SHOP)]
    with LLM("headrace-tiny", enable_lora=True, max_loras=2, num_gpu_blocks_override=64) as llm:
        messages = [[{"role": "user", "content": question}] for question, _ in asked]
        outputs = llm.chat(messages, SamplingParams(temperature=0.0, max_tokens=32), lora_request=[lora for _, lora in asked])
    texts = [output.outputs[0].text for output in outputs]
    assert texts[:3] == ["The capital of France is Paris.", "Arr! The capital of France be Paris.", "The capital of France is Paris."]
    assert texts[4].startswith("Arr!")
    assert texts[5] == "A hammer costs 12 euros at Mill and River."
