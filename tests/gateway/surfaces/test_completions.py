"""Tests POST /v1/completions: the four forms of a prompt, echo, log-probabilities in columns, several prompts."""

from __future__ import annotations

from typing import Any

import pytest
from gateway_kit import MODEL, SAID, TestBench, events_of, open_bench

from headrace.gateway.generation import parsed_request
from headrace.gateway.surfaces import completions
from headrace.text.folder import TextModel

pytestmark = pytest.mark.loop


async def test_whole_answer_has_openai_shape(bench: TestBench) -> None:
    response = await bench.complete(max_tokens=4)
    answer = response.json()
    assert answer["object"] == "text_completion"
    assert answer["id"] == f"cmpl-{response.headers['x-request-id']}"
    (choice,) = answer["choices"]
    assert set(choice) == {"index", "text", "logprobs", "finish_reason", "stop_reason"}
    assert (choice["finish_reason"], choice["logprobs"]) == ("length", None)
    assert SAID.startswith(choice["text"])
    assert answer["usage"]["completion_tokens"] == 4


async def test_default_is_sixteen_tokens(either: TestBench) -> None:
    await either.complete()
    assert either.replica.requests[0].params.max_tokens == 16


@pytest.mark.parametrize(
    ("prompt", "count"),
    [("Hello", 1), (["Hello", "world"], 2), ([5, 6, 7], 1), ([[5, 6], [7]], 2)],
    ids=["text", "texts", "ids", "id-lists"],
)
async def test_prompt_has_four_forms(either: TestBench, prompt: Any, count: int) -> None:
    answer = (await either.complete(prompt=prompt, max_tokens=2, n=2)).json()
    assert [choice["index"] for choice in answer["choices"]] == list(range(2 * count))
    assert len(either.replica.requests) == count
    assert answer["usage"]["prompt_tokens"] == sum(len(request.prompt_ids) for request in either.replica.requests)


async def test_token_ids_are_sent_as_they_are(either: TestBench) -> None:
    await either.complete(prompt=[[5, 6], [7]], max_tokens=1)
    assert [request.prompt_ids for request in either.replica.requests] == [(5, 6), (7,)]


async def test_begin_token_is_added_unless_declined(either: TestBench) -> None:
    await either.complete(prompt="Hi", max_tokens=1)
    await either.complete(prompt="Hi", max_tokens=1, add_special_tokens=False)
    bos = either.replica.text.tokenizer.bos_token_id
    first, second = (request.prompt_ids for request in either.replica.requests)
    assert first == (bos, *second)


@pytest.mark.parametrize("stream", [False, True])
async def test_echo_puts_the_prompt_first(either: TestBench, stream: bool) -> None:
    response = await either.complete(prompt=["Hello", "Bye"], echo=True, max_tokens=3, stream=stream)
    texts = {0: "", 1: ""}
    for event in events_of(response.text) if stream else [response.json()]:
        for choice in event["choices"]:
            texts[choice["index"]] += choice["text"]
    said = SAID[: len(texts[0]) - len("Hello")]
    assert texts == {0: "Hello" + said, 1: "Bye" + said}


@pytest.mark.parametrize("stream", [False, True])
async def test_echo_with_logprobs_has_those_of_the_prompt(bench: TestBench, stream: bool) -> None:
    response = await bench.complete(prompt="Hello world", echo=True, logprobs=2, max_tokens=3, stream=stream)
    choices = [choice for event in (events_of(response.text) if stream else [response.json()]) for choice in event["choices"]]
    columns: dict[str, list[Any]] = {"tokens": [], "token_logprobs": [], "top_logprobs": [], "text_offset": []}
    for choice in choices:
        for name, column in columns.items():
            column += (choice["logprobs"] or {name: []})[name]
    text = "".join(choice["text"] for choice in choices)
    assert columns["tokens"][0] == "<|begin|>"
    assert columns["token_logprobs"][0] is None
    assert columns["top_logprobs"][0] is None
    assert "".join(columns["tokens"][1:]) == text
    for token, offset in list(zip(columns["tokens"], columns["text_offset"], strict=True))[1:]:
        assert text[offset : offset + len(token)] == token


async def test_echo_alone_takes_no_token(bench: TestBench) -> None:
    answer = (await bench.complete(prompt="Hello", echo=True, logprobs=0, max_tokens=0)).json()
    assert answer["choices"][0]["text"] == "Hello"
    assert "".join(answer["choices"][0]["logprobs"]["tokens"]) == "<|begin|>Hello"
    assert answer["usage"]["completion_tokens"] == 0


async def test_logprobs_are_columns(bench: TestBench) -> None:
    choice = (await bench.complete(logprobs=2, max_tokens=3)).json()["choices"][0]
    columns = choice["logprobs"]
    assert "".join(columns["tokens"]) == choice["text"]
    assert columns["token_logprobs"] == [-0.25] * 3
    assert [len(top) for top in columns["top_logprobs"]] == [2] * 3
    assert columns["text_offset"][0] == 0


async def test_parts_of_a_character_have_names_of_their_own(bench: TestBench) -> None:
    bench.replica.said = "\U0001f389"
    tokenizer = bench.replica.text.tokenizer
    assert len(tokenizer.encode(bench.replica.said, add_special_tokens=False)) > 1
    columns = (await bench.complete(logprobs=0)).json()["choices"][0]["logprobs"]
    assert all(token.startswith("bytes:\\x") for token in columns["tokens"])
    assert len(set(columns["tokens"])) == len(columns["tokens"])


async def test_a_character_is_never_split_across_chunks(either: TestBench) -> None:
    either.replica.said = "a\U0001f389b"
    events = events_of((await either.complete(stream=True)).text)
    texts = [choice["text"] for event in events for choice in event["choices"]]
    assert "".join(texts) == "a\U0001f389b"
    assert not any("\ufffd" in text for text in texts)


async def test_streamed_prompts_are_numbered_through(either: TestBench) -> None:
    events = events_of((await either.complete(prompt=["a", "b", "c"], n=2, max_tokens=3, stream=True)).text)
    ends = [choice["index"] for event in events for choice in event["choices"] if choice["finish_reason"]]
    assert sorted(ends) == list(range(6))


async def test_prompts_of_one_request_share_its_fate(either: TestBench) -> None:
    """One prompt too long refuses the request before any of them is sent."""
    response = await either.complete(prompt=[[1, 2], [3] * 600], max_tokens=2)
    assert response.status_code == 400
    assert response.json()["error"]["param"] == "prompt"
    assert either.replica.requests == []


async def test_cached_tokens_add_up_over_prompts(either: TestBench) -> None:
    either.replica.cached_tokens = 2
    usage = (await either.complete(prompt=["Hello", "world"], max_tokens=1)).json()["usage"]
    assert usage["prompt_tokens_details"]["cached_tokens"] == 4


async def test_include_usage_comes_last(either: TestBench) -> None:
    events = events_of((await either.complete(stream=True, max_tokens=2, stream_options={"include_usage": True})).text)
    assert events[-1]["choices"] == []
    assert events[-1]["usage"]["completion_tokens"] == 2


async def test_prompts_and_sequences_of_a_request_are_bounded(text: TextModel, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(completions, "MAX_PROMPTS", 2)
    monkeypatch.setattr(parsed_request, "MAX_SEQUENCES", 3)
    async with open_bench(text) as bench:
        assert (await bench.complete(prompt=["a", "b"], max_tokens=1)).status_code == 200
        for fields in ({"prompt": ["a", "b", "c"]}, {"prompt": ["a", "b"], "n": 2}):
            refused = await bench.complete(**fields)
            assert refused.status_code == 400
            assert refused.json()["error"]["param"] in ("prompt", "n")


async def test_answers_carry_the_name_that_was_asked_for(either: TestBench) -> None:
    answer = (await either.client.post("/v1/completions", json={"model": "gpt-4o", "prompt": "x", "max_tokens": 1})).json()
    assert answer["model"] == "gpt-4o"
    served = (await either.client.get("/v1/models")).json()["data"]
    assert [(card["id"], card["root"]) for card in served] == [(MODEL, MODEL), ("gpt-4o", MODEL)]
