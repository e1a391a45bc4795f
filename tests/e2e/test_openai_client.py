"""Tests the official `openai` Python client against `headrace serve`: what it reads, streams and raises."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator

import openai
import pytest
from openai import OpenAI
from openai.types.chat import ChatCompletionUserMessageParam
from plain_loop import Checkpoint
from server_kit import KEY, Server

pytestmark = pytest.mark.process

MESSAGES: list[ChatCompletionUserMessageParam] = [{"role": "user", "content": "What is the capital of France?"}]
NEVER_STOP = {"ignore_eos": True}
COUNT = 8


@pytest.fixture(scope="module")
def client(server: Server) -> Iterator[OpenAI]:
    with OpenAI(base_url=f"http://127.0.0.1:{server.port}/v1", api_key=KEY, max_retries=0, timeout=60.0) as client:
        yield client


@pytest.fixture(scope="module")
def slow_client(fake_server: Server) -> Iterator[OpenAI]:
    """For answers that are left before their end: 3,000 tokens take a minute."""
    with OpenAI(base_url=f"http://127.0.0.1:{fake_server.port}/v1", api_key=KEY, max_retries=0, timeout=60.0) as client:
        yield client


@pytest.fixture(scope="module")
def said(client: OpenAI) -> str:
    answer = client.chat.completions.create(
        model="random", messages=MESSAGES, temperature=0, max_completion_tokens=COUNT, extra_body=NEVER_STOP
    )
    content = answer.choices[0].message.content
    assert content
    return content


def test_a_chat_answer_has_every_part(client: OpenAI, said: str) -> None:
    answer = client.chat.completions.create(model="alias", messages=MESSAGES, temperature=0, max_tokens=COUNT, extra_body=NEVER_STOP)
    (choice,) = answer.choices
    assert (choice.message.role, choice.message.content, choice.finish_reason) == ("assistant", said, "length")
    assert answer.id.startswith("chatcmpl-")
    assert (answer.object, answer.model) == ("chat.completion", "alias")
    assert answer.usage is not None
    assert answer.usage.completion_tokens == COUNT
    assert answer.usage.total_tokens == answer.usage.prompt_tokens + COUNT
    assert answer.usage.prompt_tokens_details is not None
    assert answer.usage.prompt_tokens_details.cached_tokens is not None
    assert answer._request_id


def test_a_streamed_chat_is_the_same_text_and_ends_with_usage(client: OpenAI, said: str) -> None:
    chunks = list(
        client.chat.completions.create(
            model="random",
            messages=MESSAGES,
            temperature=0,
            max_tokens=COUNT,
            stream=True,
            stream_options={"include_usage": True},
            extra_body=NEVER_STOP,
        )
    )
    *texts, last = chunks
    assert "".join(chunk.choices[0].delta.content or "" for chunk in texts) == said
    assert texts[0].choices[0].delta.role == "assistant"
    assert [chunk.choices[0].finish_reason for chunk in texts if chunk.choices[0].finish_reason] == ["length"]
    assert len({chunk.id for chunk in chunks}) == 1
    assert all(chunk.usage is None for chunk in texts)
    assert last.choices == []
    assert last.usage is not None
    assert last.usage.completion_tokens == COUNT


def test_the_clients_own_stream_helper_understands_us(client: OpenAI, said: str) -> None:
    """It raises for answers cut by max_tokens, so this one ends at a stop string."""
    stop = said[-1]
    with client.chat.completions.stream(
        model="random", messages=MESSAGES, temperature=0, max_tokens=COUNT, stop=stop, extra_body=NEVER_STOP
    ) as stream:
        kinds = {event.type for event in stream}
        assert stream.get_final_completion().choices[0].message.content == said.split(stop)[0]
    assert {"chunk", "content.delta", "content.done"} <= kinds


def test_chat_logprobs_and_top_logprobs(client: OpenAI) -> None:
    answer = client.chat.completions.create(
        model="random", messages=MESSAGES, temperature=0, max_tokens=COUNT, logprobs=True, top_logprobs=3, extra_body=NEVER_STOP
    )
    logprobs = answer.choices[0].logprobs
    assert logprobs is not None
    assert logprobs.content is not None
    assert len(logprobs.content) == COUNT
    for entry in logprobs.content:
        assert len(entry.top_logprobs) == 3
        assert entry.top_logprobs[0].logprob == entry.logprob <= 0, "greedy takes the most probable"
        assert entry.bytes is not None


def test_several_answers_with_seeds(client: OpenAI) -> None:
    def ask(seed: int) -> list[str | None]:
        answer = client.chat.completions.create(
            model="random", messages=MESSAGES, n=3, seed=seed, temperature=1.0, max_tokens=COUNT, extra_body=NEVER_STOP
        )
        assert [choice.index for choice in answer.choices] == [0, 1, 2]
        return [choice.message.content for choice in answer.choices]

    assert ask(1) == ask(1)
    assert ask(1) != ask(2)
    assert len(set(ask(1))) == 3


def test_stop_strings_are_left_out(client: OpenAI, said: str) -> None:
    stop = said[len(said) // 2]
    answer = client.chat.completions.create(
        model="random", messages=MESSAGES, temperature=0, max_tokens=COUNT, stop=[stop], extra_body=NEVER_STOP
    )
    assert answer.choices[0].message.content == said.split(stop)[0]
    assert answer.choices[0].finish_reason == "stop"


def test_completions_with_echo_and_logprobs(client: OpenAI, random_checkpoint: Checkpoint) -> None:
    prompt = list(random_checkpoint.prompts[3])
    plain = random_checkpoint.plain
    answer = client.completions.create(
        model="random", prompt=prompt, temperature=0, max_tokens=COUNT, logprobs=2, echo=True, extra_body=NEVER_STOP
    )
    (choice,) = answer.choices
    ids = plain.greedy(prompt, COUNT)
    assert choice.text.endswith(plain.text(ids))
    assert choice.logprobs is not None
    assert choice.logprobs.token_logprobs is not None
    assert choice.logprobs.tokens is not None
    assert len(choice.logprobs.token_logprobs) == len(choice.logprobs.tokens) == len(prompt) + COUNT
    assert choice.logprobs.token_logprobs[0] is None
    rows = plain.logits([*prompt, *ids]).log_softmax(-1)
    wanted = [float(rows[position - 1, token_id]) for position, token_id in enumerate([*prompt, *ids]) if position]
    assert choice.logprobs.token_logprobs[1:] == pytest.approx(wanted, abs=1e-3)


def test_streamed_completions_of_two_prompts(client: OpenAI, random_checkpoint: Checkpoint) -> None:
    prompts = [list(prompt) for prompt in random_checkpoint.prompts[:2]]
    texts = {0: "", 1: ""}
    for chunk in client.completions.create(
        model="random", prompt=prompts, temperature=0, max_tokens=COUNT, stream=True, extra_body=NEVER_STOP
    ):
        for choice in chunk.choices:
            texts[choice.index] += choice.text
    plain = random_checkpoint.plain
    assert texts == {number: plain.text(plain.greedy(prompt, COUNT)) for number, prompt in enumerate(prompts)}


def test_models_are_listed_and_looked_up(client: OpenAI) -> None:
    assert {model.id for model in client.models.list()} == {"random", "alias"}
    assert client.models.retrieve("alias").id == "alias"
    with pytest.raises(openai.NotFoundError):
        client.models.retrieve("nobody")


def test_a_refused_field_is_a_bad_request_that_names_it(client: OpenAI) -> None:
    with pytest.raises(openai.BadRequestError) as caught:
        client.chat.completions.create(model="random", messages=MESSAGES, temperature=3.5)
    error = caught.value
    assert (error.status_code, error.param, error.code, error.type) == (400, "temperature", "invalid_value", "invalid_request_error")
    assert "3.5" in str(error)
    assert error.request_id
    with pytest.raises(openai.BadRequestError) as caught:
        client.chat.completions.create(
            model="random", messages=MESSAGES, tools=[{"type": "function", "function": {"name": "two words", "parameters": {}}}]
        )
    assert caught.value.param == "tools[0].function.name"


def test_a_prompt_beyond_the_context_is_refused_with_the_arithmetic(client: OpenAI) -> None:
    with pytest.raises(openai.BadRequestError) as caught:
        client.completions.create(model="random", prompt=[5] * 500, max_tokens=50)
    assert caught.value.param == "max_tokens"
    assert "maximum context length is 512 tokens" in str(caught.value)
    assert "550 tokens (500 in the prompt, 50 in the completion)" in str(caught.value)


def test_a_streamed_request_that_is_refused_has_its_status(client: OpenAI) -> None:
    with pytest.raises(openai.BadRequestError):
        client.chat.completions.create(model="random", messages=MESSAGES, stream=True, top_p=2)


def test_a_model_nobody_serves_is_not_found(client: OpenAI) -> None:
    with pytest.raises(openai.NotFoundError) as caught:
        client.chat.completions.create(model="gpt-17", messages=MESSAGES)
    assert (caught.value.code, caught.value.param) == ("model_not_found", "model")
    assert "random" in str(caught.value)


@pytest.mark.parametrize("key", ["wrong", ""])
def test_a_wrong_key_is_an_authentication_error(server: Server, key: str) -> None:
    with OpenAI(base_url=f"http://127.0.0.1:{server.port}/v1", api_key=key or "-", max_retries=0) as stranger:
        for call in (stranger.models.list, lambda: stranger.chat.completions.create(model="random", messages=MESSAGES)):
            with pytest.raises(openai.AuthenticationError) as caught:
                call()
            assert caught.value.code == "invalid_api_key"
            assert KEY not in str(caught.value)


def cancellations(server: Server) -> float:
    return server.metric("headrace_sequences_finished_total", reason="cancelled")


def test_closing_a_stream_early_frees_its_blocks(fake_server: Server, slow_client: OpenAI) -> None:
    before = cancellations(fake_server)
    stream = slow_client.completions.create(model="fake", prompt=[9, 8, 7], max_tokens=3000, n=8, stream=True, extra_body=NEVER_STOP)
    next(iter(stream))
    stream.close()
    fake_server.until(lambda: cancellations(fake_server) == before + 8)
    fake_server.until(lambda: fake_server.load().is_idle)


async def test_the_async_client_runs_many_at_once(server: Server, said: str) -> None:
    async with openai.AsyncOpenAI(base_url=f"http://127.0.0.1:{server.port}/v1", api_key=KEY, max_retries=0) as client:
        answers = await asyncio.gather(
            *(
                client.chat.completions.create(model="random", messages=MESSAGES, temperature=0, max_tokens=COUNT, extra_body=NEVER_STOP)
                for _ in range(8)
            )
        )
    assert {answer.choices[0].message.content for answer in answers} == {said}
