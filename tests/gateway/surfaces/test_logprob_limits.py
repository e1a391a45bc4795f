"""Tests that an answer's log-probabilities are charged what they take in memory, and that joining their pages costs no more than reading
them.
"""

from __future__ import annotations

import gc
import tracemalloc
from collections.abc import Callable
from random import Random

import pytest

from headrace.core.plan import LogprobColumns, TokenLogprobs, wide_columns
from headrace.core.update import FinishReason
from headrace.gateway.generation.answer_memory import encoded_prompt_logprob_bytes, prompt_logprob_bytes
from headrace.gateway.surfaces.dialect.logprobs import echo_logprobs, prompt_logprobs
from headrace.gateway.upstream.own.upstream import TokenPrompt
from headrace.gateway.upstream.seam import OutputEvent
from headrace.text.folder import TextModel

pytestmark = [pytest.mark.pure, pytest.mark.usefixtures("frozen_heap")]  # or each collection would walk what other tests left

NUM_LOGPROBS = 4_000


def pages(num_tokens: int, num_top: int, vocab_size: int) -> list[LogprobColumns]:
    rng, made = Random(1), []
    for begin in range(0, num_tokens, 256):
        page = wide_columns()
        for _ in range(min(256, num_tokens - begin)):
            tops = tuple(rng.randrange(vocab_size) for _ in range(num_top))
            page.append(TokenLogprobs(rng.randrange(vocab_size), -9 * rng.random(), 3, tops, tuple(-9 * rng.random() for _ in tops)))
        made.append(page)
    return made


def taken_bytes(make: Callable[[], object]) -> int:
    """Memory of what `make` returns, measured at its second call: what the first one fills tables with is no request's."""
    make()
    gc.collect()
    tracemalloc.start()
    try:
        kept = make()
        gc.collect()
        return tracemalloc.get_traced_memory()[0] if kept is not None else 0
    finally:
        tracemalloc.stop()


@pytest.mark.parametrize("num_top", [0, 1, 5, 20])
def test_prompt_logprobs_are_charged_what_they_take(text: TextModel, num_top: int) -> None:
    num_tokens = NUM_LOGPROBS // (num_top + 1)
    vocab_size = text.tokenizer.vocab_size
    token_ids = tuple(number % vocab_size for number in range(num_tokens + 1))
    prompt = TokenPrompt("", len(token_ids), token_ids=token_ids, tokenizer=text.tokenizer)
    given = pages(num_tokens, num_top, vocab_size)

    def collected() -> LogprobColumns:
        columns = wide_columns()
        for page in given:
            columns.extend(page)
        return columns

    logprobs = collected()

    def echoed() -> object:
        work = echo_logprobs(prompt, logprobs, num_top)
        while True:
            try:
                next(work)
            except StopIteration as ended:
                return ended.value

    columns = taken_bytes(collected)
    assert columns <= prompt_logprob_bytes(num_top, num_tokens=num_tokens) <= 1.6 * columns
    charged = encoded_prompt_logprob_bytes(num_top, num_tokens=num_tokens, num_encodings=1)
    encoded = taken_bytes(lambda: list(prompt_logprobs(prompt, logprobs, num_top)))
    assert encoded <= charged <= 1.6 * encoded
    assert taken_bytes(echoed) <= charged


def test_joined_events_share_the_pages_of_logprobs_they_were_given() -> None:
    """Each page was copied once per later page: a prompt of a million log-probabilities took the square of its pages."""
    given = pages(1000, 2, 100)
    events = [OutputEvent(0, f"{number} ", 1, prompt_logprobs=(page,)) for number, page in enumerate(given)]
    joined = OutputEvent.joined([*events, OutputEvent(0, finish=FinishReason.STOP)])
    assert all(ours is page for ours, page in zip(joined.prompt_logprobs, given, strict=True))
    assert (joined.text, joined.num_tokens, joined.finish) == ("0 1 2 3 ", 4, FinishReason.STOP)
    assert OutputEvent.joined(events[:1]) is events[0]
