"""An answer that nobody reads is not encoded to its end."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable

import pytest
from gateway_kit import eventually, scored

from headrace.gateway.generation.answer_pool import AnswerPool
from headrace.gateway.generation.wanted import WantedPrompt
from headrace.gateway.http.errors import ClientLeft
from headrace.gateway.upstream.token_prompt import TokenPrompt
from headrace.text.folder import TextModel


async def test_what_waits_for_its_turn_is_dropped_when_its_client_leaves() -> None:
    """44 abandoned echo streams delayed the next requests by more than ten seconds."""
    pool, gate, ran = AnswerPool(), threading.Event(), []

    def work(number: int) -> int:
        ran.append(number)
        gate.wait(30)
        return number

    tasks = [asyncio.create_task(pool.run(work, number)) for number in range(44)]
    await eventually(lambda: ran == [0])
    for task in tasks[:-1]:
        task.cancel()
    await asyncio.gather(*tasks[:-1], return_exceptions=True)
    gate.set()
    assert await tasks[-1] == 43
    assert ran == [0, 43]
    assert pool.num_pending == 0
    pool.close()


def test_what_runs_ends_at_its_next_token(text: TextModel) -> None:
    ids = tuple(range(20, 120))
    prompt = TokenPrompt(ids, text.tokenizer.decode(ids), text.tokenizer)
    seen = 0

    def leave_after(count: int) -> Callable[[], None]:
        def check() -> None:
            if seen == count:
                raise ClientLeft("The client left.")

        return check

    scores = [scored(token_id, 2) for token_id in ids[1:]]
    entries = WantedPrompt(prompt, leave_after(7)).entries(scores)
    while seen < 7:
        next(entries)
        seen += 1
    with pytest.raises(ClientLeft):
        next(entries)
    wanted = WantedPrompt(prompt, leave_after(-1))
    assert list(wanted.entries(scores)) == list(prompt.entries(scores))
    assert wanted.text == prompt.text
