"""Tests context_fitting over HTTP: what is left out, what the answer says of it, what is billed, and what is refused as before."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from foreign_kit import DONE, ScriptedServer, head, said, scripted
from gateway_kit import MAX_MODEL_LEN, SAID, TestBench, events_of, open_bench
from session_kit import CHAT, assistant, history, prompt_of, roles, turn, user

from headrace.gateway.generation.answer_memory import AnswerMemory
from headrace.gateway.sessions.history import SUMMARY_TITLE
from headrace.text.folder import TextModel

pytestmark = pytest.mark.loop

SYSTEM = {"role": "system", "content": "Be kind."}
WORDS = "The quick brown fox jumps over the lazy dog. "


def conversation(num_turns: int, *, words: int = 2) -> list[dict[str, Any]]:
    """Turns of about 30 tokens."""
    turns = [message for number in range(num_turns) for message in (user(f"Turn {number}: {WORDS * words}"), assistant("Yes."))]
    return [SYSTEM, *turns, user("And now?")]


async def fitted(bench: TestBench, fitting: str, messages: list[dict[str, Any]], **fields: Any) -> Any:
    return await bench.client.post(CHAT, json={"messages": messages, "context_fitting": fitting, "max_tokens": 20, **fields})


async def test_without_the_field_a_long_conversation_is_refused(text: TextModel) -> None:
    async with open_bench(text) as bench:
        for fields in ({}, {"context_fitting": "refuse"}):
            refused = await bench.client.post(CHAT, json={"messages": conversation(30), **fields})
            assert refused.json()["error"]["code"] == "context_length_exceeded"
        odd = await bench.client.post(CHAT, json={"messages": conversation(1), "context_fitting": "guess"})
        assert "one of refuse, sliding_window, summary" in odd.json()["error"]["message"]
        assert not bench.replica.requests


async def test_what_fits_is_left_as_it_is(text: TextModel) -> None:
    async with open_bench(text) as bench:
        for fitting in ("refuse", "sliding_window", "summary"):
            answer = await fitted(bench, fitting, conversation(3))
            assert answer.status_code == 200
            assert "x-headrace-context" not in answer.headers
            assert "context" not in answer.json()["usage"]
        assert len({request.prompt_ids for request in bench.replica.requests}) == 1


async def test_a_fitted_conversation_is_accounted_for_once(text: TextModel, monkeypatch: pytest.MonkeyPatch) -> None:
    """Whatever is fitted, memory is charged once, for what was prepared last."""
    prepared: list[int | None] = []
    monkeypatch.setattr(AnswerMemory, "reserve", lambda _, made: prepared.append(made.prompt_tokens))
    async with open_bench(text) as bench:
        for fitting, num_turns in (("refuse", 1), ("sliding_window", 1), ("sliding_window", 30), ("summary", 30)):
            assert (await fitted(bench, fitting, conversation(num_turns))).status_code == 200
            assert prepared.pop() == len(bench.replica.requests[-1].prompt_ids)
            assert not prepared


@pytest.mark.parametrize("stream", [False, True])
async def test_the_oldest_turns_are_left_out_and_the_answer_says_how_many(text: TextModel, stream: bool) -> None:
    options = {"stream": True, "stream_options": {"include_usage": True}} if stream else {}
    async with open_bench(text) as bench:
        answer = await fitted(bench, "sliding_window", conversation(30), **options)
        assert answer.status_code == 200, answer.text
        prompt = prompt_of(bench)
        assert "Be kind." in prompt
        assert "And now?" in prompt
        num_left = sum(f"Turn {number}:" in prompt for number in range(30))
        assert [f"Turn {number}:" in prompt for number in range(30)] == [False] * (30 - num_left) + [True] * num_left
        assert 0 < num_left < 30
        assert len(bench.replica.requests[-1].prompt_ids) <= 0.75 * (MAX_MODEL_LEN - 20)
        dropped = 2 * (30 - num_left)
        assert answer.headers["x-headrace-context"] == f"sliding_window; dropped={dropped}"
        usage = events_of(answer.text)[-1]["usage"] if stream else answer.json()["usage"]
        none = {"summary_prompt_tokens": 0, "summary_completion_tokens": 0}
        assert usage["context"] == {"fitting": "sliding_window", "dropped_messages": dropped, **none}


async def test_the_next_turns_begin_as_the_one_before_did(text: TextModel) -> None:
    """Or no prefix would be cached."""
    async with open_bench(text) as bench:
        num_cut = 0
        for number in range(24):
            answer = await turn(bench, "s", f"Turn {number}: {WORDS}", context_fitting="sliding_window", max_tokens=2)
            assert answer.status_code == 200, answer.text
            num_cut += "x-headrace-context" in answer.headers
        assert 1 <= num_cut <= 4
        assert len(await history(bench, "s")) < 48


async def test_where_the_last_turn_alone_does_not_fit_the_request_is_refused(text: TextModel) -> None:
    async with open_bench(text) as bench:
        for fitting in ("sliding_window", "summary"):
            refused = await fitted(bench, fitting, [*conversation(3), assistant("No."), user(WORDS * 100)])
            assert refused.json()["error"]["code"] == "context_length_exceeded", refused.text
            alone = await fitted(bench, fitting, [user(WORDS * 100)])
            assert alone.json()["error"]["code"] == "context_length_exceeded", alone.text


async def test_a_tiers_context_is_a_window_too(text: TextModel) -> None:
    keys = [{"key": "key-of-free", "tenant": "one", "tier": "small"}]
    async with open_bench(text, api_keys=keys, tiers={"small": {"max_context_tokens": 200}}) as bench:
        bench.client.headers["authorization"] = "Bearer key-of-free"
        answer = await fitted(bench, "sliding_window", conversation(10))
        assert answer.status_code == 200, answer.text
        assert len(bench.replica.requests[-1].prompt_ids) <= 0.75 * (200 - 20)


async def test_a_tool_call_stays_with_its_result(text: TextModel) -> None:
    turns = conversation(12)
    async with open_bench(text) as bench:
        answer = await fitted(bench, "sliding_window", [*turns[:-1], user("Call."), assistant("Calling."), user("And now?")])
        assert answer.status_code == 200
        assert prompt_of(bench).index("Call.") < prompt_of(bench).index("Calling.")


async def test_the_model_summarises_what_is_left_out_once_and_it_is_billed(text: TextModel, tmp_path: Path) -> None:
    log = tmp_path / "log"
    async with open_bench(text, request_log=str(log)) as bench:
        answer = await turn(bench, "s", *[m["content"] for m in conversation(30)[1:]], context_fitting="summary", max_tokens=20)
        assert answer.status_code == 200, answer.text
        *summaries, asked = bench.replica.requests
        assert summaries
        assert SUMMARY_TITLE in prompt_of(bench)
        assert SAID.split(".", maxsplit=1)[0] in prompt_of(bench)
        usage = answer.json()["usage"]
        spent = usage["context"]
        assert spent["fitting"] == "summary"
        assert spent["summary_prompt_tokens"] == sum(len(request.prompt_ids) for request in summaries)
        assert usage["prompt_tokens"] == len(asked.prompt_ids)
        begun = {tuple(request.prompt_ids) for request in summaries}
        assert len(begun) == len(summaries), "no part is summarised twice"
        shown = (await bench.client.get("/v1/sessions/s")).json()
        assert shown["summary"]
        assert SUMMARY_TITLE not in str(shown["messages"])
        bench.replica.requests.clear()
        later = await turn(bench, "s", "And then?", context_fitting="summary", max_tokens=5)
        assert "x-headrace-context" not in later.headers
        assert len(bench.replica.requests) == 1, "what is summarised is not summarised again"
        assert SUMMARY_TITLE in prompt_of(bench)
    record = json.loads(log.read_text().splitlines()[0])
    assert record["prompt_tokens"] == usage["prompt_tokens"] + spent["summary_prompt_tokens"]
    assert record["completion_tokens"] == usage["completion_tokens"] + spent["summary_completion_tokens"]


async def test_a_session_keeps_what_was_fitted(text: TextModel) -> None:
    async with open_bench(text) as bench:
        await turn(bench, "s", *[m["content"] for m in conversation(30)[1:]], context_fitting="sliding_window", max_tokens=5)
        kept = await history(bench, "s")
        assert len(kept) < 60
        assert roles(kept).endswith("ua")


async def test_a_model_of_foreign_servers_alone_is_not_fitted_and_the_answer_says_so(text: TextModel) -> None:
    server = ScriptedServer(head(), said("Hi", "stop"), DONE)
    async with scripted(text, server) as bench:
        body = {"model": "far", "messages": conversation(3), "stream": True, "context_fitting": "sliding_window"}
        answer = await bench.client.post(CHAT, json=body)
        assert (answer.status_code, answer.headers["x-headrace-ignored"]) == (200, "context_fitting")
