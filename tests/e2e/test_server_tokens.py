"""Tests over sockets, through `headrace serve`, that a greedy answer is the plain loop's, whatever else the server does at the
same time.
"""

from __future__ import annotations

import asyncio
import random
from collections.abc import Sequence
from typing import Any

import pytest
from http_kit import CHAT, COMPLETIONS, Answer, ask, stream
from plain_loop import Checkpoint
from server_kit import KEY, Server

pytestmark = pytest.mark.process

COUNT = 12
EXACT: dict[str, Any] = {"temperature": 0, "ignore_eos": True, "max_tokens": COUNT}


def completion(prompt: Sequence[int], model: str = "random", **changes: Any) -> dict[str, Any]:
    return {"model": model, "prompt": list(prompt), **EXACT, **changes}


async def told(server: Server, body: dict[str, Any], **how: Any) -> Answer:
    return await stream(server.port, COMPLETIONS, {**body, "stream_options": {"include_usage": True}}, key=KEY, **how)


def check(answer: Answer, checkpoint: Checkpoint, prompt: Sequence[int], count: int = COUNT, n: int = 1) -> None:
    expected = checkpoint.plain.text(checkpoint.plain.greedy(prompt, count))
    assert answer.is_done
    assert dict(answer.text) == dict.fromkeys(range(n), expected)
    assert answer.finish == dict.fromkeys(range(n), "length")
    assert (answer.usage["prompt_tokens"], answer.usage["completion_tokens"]) == (len(prompt), n * count)


async def test_streams_at_the_same_time_each_get_their_own_tokens(server: Server, random_checkpoint: Checkpoint) -> None:
    prompts = random_checkpoint.prompts
    answers = await asyncio.gather(*(told(server, completion(prompt)) for prompt in prompts))
    for prompt, answer in zip(prompts, answers, strict=True):
        check(answer, random_checkpoint, prompt)


async def test_whole_answers_and_several_prompts_in_one_request(server: Server, random_checkpoint: Checkpoint) -> None:
    prompts = random_checkpoint.prompts[:4]
    body = {**completion([]), "prompt": [list(prompt) for prompt in prompts], "n": 2}
    reply = (await ask(server.port, "POST", COMPLETIONS, body, key=KEY)).json()
    plain = random_checkpoint.plain
    expected = [plain.text(plain.greedy(prompt, COUNT)) for prompt in prompts for _ in range(2)]
    assert [choice["text"] for choice in sorted(reply["choices"], key=lambda choice: choice["index"])] == expected


async def test_a_chats_tokens_are_those_of_its_rendered_prompt(server: Server, random_checkpoint: Checkpoint) -> None:
    messages = [{"role": "user", "content": "What is the capital of France?"}]
    body = {"model": "random", "messages": messages, **EXACT, "logprobs": True}
    answer = await stream(server.port, CHAT, body, key=KEY)
    rendered = await ask(server.port, "POST", "/tokenize", {"model": "random", "messages": messages}, key=KEY)
    ids = random_checkpoint.plain.greedy(rendered.json()["tokens"], COUNT)
    text = random_checkpoint.text.tokenizer
    assert answer.tokens[0] == [text.token_bytes(token_id) for token_id in ids]
    assert answer.text[0] == random_checkpoint.plain.text(ids)


async def test_a_prompt_seen_before_is_a_prefix_hit_with_the_same_answer(server: Server, random_checkpoint: Checkpoint) -> None:
    prompt = max(random_checkpoint.prompts, key=len)
    salted = completion(prompt, cache_salt="prefix-hit")
    first, second = await told(server, salted), await told(server, salted)
    hits = [answer.usage["prompt_tokens_details"]["cached_tokens"] for answer in (first, second)]
    assert hits == [0, (len(prompt) - 1) // 16 * 16]
    for answer in (first, second):
        check(answer, random_checkpoint, prompt)


async def test_more_than_the_memory_holds_is_preempted_and_loses_nothing(server: Server, random_checkpoint: Checkpoint) -> None:
    """Ten sequences of up to 140 tokens want nearly twice what there is; salts keep them from sharing."""
    before = server.load().preemptions
    prompts = sorted(random_checkpoint.prompts, key=len)[-5:] * 2
    bodies = [completion(prompt, max_tokens=100, cache_salt=str(number)) for number, prompt in enumerate(prompts)]
    answers = await asyncio.gather(*(told(server, body) for body in bodies))
    for prompt, answer in zip(prompts, answers, strict=True):
        check(answer, random_checkpoint, prompt, 100)
    assert server.load().preemptions > before
    await server.eventually(lambda: server.load().is_idle)


async def test_neighbours_that_hang_up_change_nothing(server: Server, random_checkpoint: Checkpoint) -> None:
    draw = random.Random(5)
    prompts = random_checkpoint.prompts
    doomed = [
        told(server, completion(draw.choice(prompts), max_tokens=200, cache_salt=f"d{number}"), leave_after=draw.randrange(6))
        for number in range(12)
    ]
    answers = await asyncio.gather(*(told(server, completion(prompt)) for prompt in prompts), *doomed)
    for prompt, answer in zip(prompts, answers, strict=False):
        check(answer, random_checkpoint, prompt)
    await server.eventually(lambda: server.load().is_idle)


async def test_several_answers_and_a_stop_string(server: Server, random_checkpoint: Checkpoint) -> None:
    prompt = random_checkpoint.prompts[3]
    check(await told(server, completion(prompt, n=3)), random_checkpoint, prompt, n=3)
    whole = random_checkpoint.plain.text(random_checkpoint.plain.greedy(prompt, COUNT))
    stop = whole[len(whole) // 2 : len(whole) // 2 + 2]
    answer = await told(server, completion(prompt, stop=stop))
    assert answer.text[0] == whole[: whole.find(stop)]
    assert answer.finish == {0: "stop"}
    await server.eventually(lambda: server.load().is_idle)


async def test_two_replicas_answer_as_one_plain_loop(pair: Server, trained_checkpoint: Checkpoint) -> None:
    prompts = trained_checkpoint.prompts * 2
    answers = await asyncio.gather(*(told(pair, completion(prompt, "pair")) for prompt in prompts))
    for prompt, answer in zip(prompts, answers, strict=True):
        check(answer, trained_checkpoint, prompt)
    made = [pair.metric("headrace_generation_tokens_total", replica=f"pair-{number}") for number in range(2)]
    assert all(made), f"one replica did nothing: {made}"
    assert sum(made) >= len(prompts) * COUNT


async def test_the_bundled_model_knows_the_capital_of_france(pair: Server) -> None:
    body = {
        "model": "pair",
        "messages": [{"role": "user", "content": "What is the capital of France?"}],
        "temperature": 0,
        "max_tokens": 30,
    }
    reply = (await ask(pair.port, "POST", CHAT, body, key=KEY)).json()
    assert "Paris" in reply["choices"][0]["message"]["content"]
    assert reply["choices"][0]["finish_reason"] == "stop"


@pytest.mark.parametrize("params", [{"temperature": 1.0}, {"temperature": 0.8, "top_p": 0.9, "top_k": 20, "presence_penalty": 0.7}])
async def test_a_seeded_request_among_31_neighbours_samples_what_it_samples_alone(
    server: Server, random_checkpoint: Checkpoint, params: dict[str, Any]
) -> None:
    draw = random.Random(11)
    prompt = random_checkpoint.prompts[5]
    body = completion(prompt, **params, seed=1234, logprobs=0)
    alone = await told(server, body)

    def neighbour(number: int) -> dict[str, Any]:
        chosen: dict[str, Any] = {"temperature": draw.uniform(0, 1.5), "top_p": draw.uniform(0.3, 1), "seed": draw.randrange(2**40)}
        return completion(draw.choice(random_checkpoint.prompts), **chosen, max_tokens=draw.randint(1, 30), cache_salt=str(number))

    neighbours = [told(server, neighbour(number)) for number in range(31)]
    crowd = await asyncio.gather(*neighbours[:16], told(server, body), *neighbours[16:])
    assert crowd[16].text == alone.text
    assert alone.text[0] != random_checkpoint.plain.text(random_checkpoint.plain.greedy(prompt, COUNT)), "it was sampled"
