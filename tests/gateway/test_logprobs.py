"""Log-probabilities as JSON: what the model rules out still has a number."""

from __future__ import annotations

import json
import math
import threading
from typing import Any

import msgspec
import pytest
from gateway_kit import MAX_MODEL_LEN, TestBench, events_of, eventually

from headrace.gateway.generation import score_limits
from headrace.gateway.surfaces import completions
from headrace.gateway.surfaces.dialect.logprobs import LOWEST_LOGPROB, chat_logprobs, completion_logprobs, echo_logprobs
from headrace.text.assemble import TokenEntry, TopToken


def test_a_token_the_model_rules_out_gets_the_lowest_number_not_null() -> None:
    top = TopToken(2, "b", b"b", -math.inf)
    entry = TokenEntry(1, "a", b"a", -math.inf, 1, (top,), 0)
    chat = json.loads(msgspec.json.encode(chat_logprobs([entry], 1)))
    assert chat["content"][0]["logprob"] == chat["content"][0]["top_logprobs"][0]["logprob"] == LOWEST_LOGPROB
    completion = json.loads(msgspec.json.encode(completion_logprobs([entry], 1)))
    assert completion["token_logprobs"] == [LOWEST_LOGPROB]
    assert completion["top_logprobs"] == [{"a": LOWEST_LOGPROB, "b": LOWEST_LOGPROB}]


@pytest.mark.parametrize("is_streaming", [False, True])
async def test_a_prompt_is_scored_once_whatever_n_is(bench: TestBench, monkeypatch: pytest.MonkeyPatch, is_streaming: bool) -> None:
    """Choices of one prompt show the same scores: they are made once."""
    made: list[str] = []
    for name in ("echo_logprobs", "prompt_logprobs"):
        monkeypatch.setattr(completions, name, noting(made, name, getattr(completions, name)))
    more = {} if is_streaming else {"prompt_logprobs": 1}
    response = await bench.complete(prompt=["Hello", "Bye"], n=3, echo=True, logprobs=2, max_tokens=2, stream=is_streaming, **more)
    assert sorted(made) == ["echo_logprobs"] * 2 + ["prompt_logprobs"] * (0 if is_streaming else 2)
    choices = [event["choices"][0] for event in events_of(response.text)] if is_streaming else response.json()["choices"]
    firsts = {choice["index"]: choice["logprobs"]["tokens"][0] for choice in reversed(choices) if choice["logprobs"]}
    assert [firsts[index] for index in range(6)] == [firsts[0]] * 3 + [firsts[3]] * 3


@pytest.mark.parametrize("is_streaming", [False, True])
async def test_many_scores_are_written_off_the_event_loop(bench: TestBench, monkeypatch: pytest.MonkeyPatch, is_streaming: bool) -> None:
    threads: list[str] = []
    monkeypatch.setattr(completions, "echo_logprobs", noting(threads, threading.current_thread, echo_logprobs))
    for prompt in ([5], [5] * (MAX_MODEL_LEN - 1)):
        response = await bench.complete(prompt=prompt, echo=True, logprobs=20, max_tokens=1, stream=is_streaming)
        assert response.status_code == 200
    small, large = (getattr(thread, "name", "") for thread in threads)
    assert not small.startswith("answers")
    assert large.startswith("answers")


async def test_scores_of_prompts_are_capped_before_anything_runs(bench: TestBench) -> None:
    prompts = [[5] * 500] * 2
    response = await bench.complete(prompt=prompts, n=64, prompt_logprobs=20, max_tokens=1)
    error = response.json()["error"]
    assert (response.status_code, error["param"], error["code"]) == (413, "prompt_logprobs", "request_too_large")
    assert "prompt tokens (1000) x (prompt_logprobs + 1) x choices (64) <= 1048576" in error["message"]
    response = await bench.complete(prompt=prompts, n=64, echo=True, logprobs=20, max_tokens=1)
    assert (response.status_code, response.json()["error"]["param"]) == (413, "logprobs")
    assert bench.replica.requests == []


async def test_scores_of_a_whole_answer_are_capped_before_it_runs_where_its_length_is_given(bench: TestBench) -> None:
    prompts = [[5]] * 4
    response = await bench.complete(prompt=prompts, n=32, logprobs=20, max_tokens=100)
    error = response.json()["error"]
    assert (response.status_code, error["param"], error["code"]) == (413, "logprobs", "request_too_large")
    assert "tokens of all choices (12800) x (alternatives + 1) <= 262144 without stream" in error["message"]
    assert bench.replica.requests == []
    assert (await bench.complete(prompt=prompts, n=32, logprobs=20, max_tokens=100, stream=True)).status_code == 200


async def test_scores_of_a_whole_answer_are_capped_while_it_runs(bench: TestBench, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(score_limits, "MAX_OUTPUT_SCORES", 30)
    assert (await bench.chat(logprobs=True, top_logprobs=2, max_tokens=10)).status_code == 200
    response = await bench.chat(logprobs=True, top_logprobs=2)
    assert (response.status_code, response.json()["error"]["param"]) == (413, "top_logprobs")
    await eventually(lambda: bench.replica.num_open == 0)


def noting(notes: list[Any], what: Any, call: Any) -> Any:
    """`call`, which adds `what` (or what it returns) to `notes` each time."""

    def noted(*args: Any, **kwargs: Any) -> Any:
        notes.append(what() if callable(what) else what)
        return call(*args, **kwargs)

    return noted
