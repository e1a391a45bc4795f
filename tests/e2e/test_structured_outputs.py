"""An answer that has to match is the same from `LLM` and from `headrace serve`, for the same seed."""

from __future__ import annotations

import asyncio
import json
from pathlib import Path
from typing import Any

import pytest
from http_kit import CHAT, COMPLETIONS, ask
from server_kit import Server

from headrace import LLM, SamplingParams, StructuredOutputsParams

pytestmark = pytest.mark.process

CITY = {
    "type": "object",
    "properties": {"city": {"type": "string", "maxLength": 12}, "people": {"type": "integer", "minimum": 0, "maximum": 99999}},
    "required": ["city", "people"],
    "additionalProperties": False,
}
FORMS: list[dict[str, Any]] = [
    {"json": CITY},
    {"json": json.dumps(CITY)},
    {"regex": "[a-z]{3,9}(-[0-9]{2}){1,4}"},
    {"choice": ["yes, of course", "yes", "no"]},
    {"grammar": 'start: WORD ("," WORD){0,5}\nWORD: /[a-z]{1,4}/'},
    {"grammar": 'root ::= "<" root ">" | [a-z]+'},
    {"json_object": True},
]
PROMPT = "Tell me something about a city."
EXACT: dict[str, Any] = {"temperature": 1.0, "top_p": 1.0, "min_p": 0.0, "repetition_penalty": 1.0, "max_tokens": 60}
Ended = tuple[str, str | None]


@pytest.fixture(scope="module")
def offline(trained_folder: Path) -> list[list[Ended]]:
    """What LLM answers, per form: a completion and a chat, with how they ended."""
    params = [
        SamplingParams(seed=seed, structured_outputs=StructuredOutputsParams(**form), top_k=0, **EXACT) for seed, form in enumerate(FORMS)
    ]
    with LLM(trained_folder, dtype="float32", num_threads=1, num_gpu_blocks_override=200) as llm:
        completions = llm.generate([PROMPT] * len(params), params, use_tqdm=False)
        chats = llm.chat([[{"role": "user", "content": PROMPT}]] * len(params), params, use_tqdm=False)
    return [[(output.outputs[0].text, output.outputs[0].finish_reason) for output in both] for both in zip(completions, chats, strict=True)]


async def test_the_server_answers_as_llm_does(pair: Server, offline: list[list[Ended]]) -> None:
    async def answered(seed: int, form: dict[str, Any]) -> list[Ended]:
        body = {"model": "pair", "seed": seed, "structured_outputs": form, "top_k": -1, **EXACT}
        completion, chat = await asyncio.gather(
            ask(pair.port, "POST", COMPLETIONS, {**body, "prompt": PROMPT}),
            ask(pair.port, "POST", CHAT, {**body, "messages": [{"role": "user", "content": PROMPT}]}),
        )
        first, second = completion.json()["choices"][0], chat.json()["choices"][0]
        return [(first["text"], first["finish_reason"]), (second["message"]["content"], second["finish_reason"])]

    found = await asyncio.gather(*(answered(seed, form) for seed, form in enumerate(FORMS)))
    assert list(found) == offline
    assert sum(reason == "stop" for both in offline for _, reason in both) >= 10
