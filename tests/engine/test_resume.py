"""Tests that any sequence of a request, cut off at any token, goes on alone as if nothing had happened: the same random numbers and
outputs.

A resume is a request with `first_index` = the sequence's index, n = 1, and the output ids so far.
"""

from __future__ import annotations

import random
from collections import defaultdict
from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from real_engine import RealEngine

from headrace.bundled import bundled_path
from headrace.core.errors import InvalidRequest
from headrace.core.ids import RequestId
from headrace.core.plan import TokenLogprobs
from headrace.core.request import EngineRequest
from headrace.core.sampling import MAX_N, SamplingParams
from headrace.core.update import FinishReason, Rejected, SequenceUpdate
from headrace.engine.config import EngineConfig
from headrace.lab.fake_runner import FakeOptions, fake_answer, fake_engine

pytestmark = pytest.mark.pure

PROMPT = tuple(range(3, 30))
OPTIONS = FakeOptions(vocab_size=500, max_model_len=256, num_blocks=129, block_size=4)


def sampled(name: str, **changes: Any) -> EngineRequest:
    given = {
        "n": 4, "seed": 7, "temperature": 1.0, "top_p": 0.95, "min_tokens": 12, "max_tokens": 24, "logprobs": 2,
        "presence_penalty": 0.5, "frequency_penalty": 0.4, "repetition_penalty": 1.2,
    }  # fmt: skip
    return EngineRequest(request_id=RequestId(name), prompt_ids=PROMPT, params=SamplingParams(**{**given, **changes}))


def resumed(whole: EngineRequest, index: int, token_ids: list[int]) -> EngineRequest:
    return replace(
        whole,
        request_id=RequestId(f"{whole.request_id}-{index}"),
        params=whole.params.with_(n=1),
        first_index=index,
        output_ids=tuple(token_ids),
    )


def test_first_index_is_held_to_the_number_of_sequences_a_request_may_have() -> None:
    limits = {"vocab_size": 500, "max_model_len": 256}
    replace(sampled("r"), first_index=MAX_N - 4).checked(**limits)
    for wrong in (-1, MAX_N - 3, 2**32):
        with pytest.raises(InvalidRequest, match="first_index"):
            replace(sampled("r"), first_index=wrong).checked(**limits)


Heard = dict[tuple[str, int], list[SequenceUpdate]]


def heard_of(requests: list[EngineRequest], config: EngineConfig) -> Heard:
    """Every update of a fake engine, by request and index."""
    heard: Heard = defaultdict(list)

    def take(updates: list[SequenceUpdate | Rejected]) -> None:
        for update in updates:
            assert isinstance(update, SequenceUpdate), update
            heard[update.request_id, update.index].append(update)

    engine = fake_engine(take, OPTIONS, config)
    for request in requests:
        engine.submit(request)
    while engine.turn():
        pass
    engine.scheduler.check()
    return heard


def said(updates: list[SequenceUpdate]) -> tuple[list[int], list[TokenLogprobs], FinishReason | None]:
    tokens = [token for update in updates for token in update.token_ids]
    return tokens, [entry for update in updates for entry in update.logprobs], updates[-1].finish


@settings(max_examples=25, deadline=None)
@given(st.data(), st.sampled_from([1, 2]))
def test_every_sequence_resumes_alone_in_the_loop(data: st.DataObject, depth: int) -> None:
    config = EngineConfig(model="fake", max_num_seqs=6, max_num_batched_tokens=9, block_size=4, depth=depth)
    first = data.draw(st.integers(0, 5))
    whole = replace(sampled("r"), first_index=first)
    unbroken = heard_of([whole], config)
    assert {index for _, index in unbroken} == set(whole.indices)
    cuts = {index: data.draw(st.integers(1, 23)) for index in whole.indices}
    parts = [resumed(whole, index, said(unbroken["r", index])[0][:cut]) for index, cut in cuts.items()]
    rest = heard_of(parts, config)
    for part in parts:
        index, cut = part.first_index, len(part.output_ids)
        tokens, logprobs, finish = said(unbroken["r", index])
        assert tokens == fake_answer(whole, index, 24, OPTIONS)
        assert said(rest[part.request_id, index]) == (tokens[cut:], logprobs[cut:], finish)


def test_the_first_sequence_of_a_resumed_request_tells_the_prompts_logprobs() -> None:
    whole = sampled("r", prompt_logprobs=1)
    config = EngineConfig(model="fake", block_size=4)
    part = resumed(whole, 2, fake_answer(whole, 2, 5, OPTIONS))
    for request in (whole, part):
        entries = [
            entry for update in heard_of([request], config)[request.request_id, request.first_index] for entry in update.prompt_logprobs
        ]
        assert [entry.token_id for entry in entries] == list(PROMPT[1:])


@pytest.mark.socket
@pytest.mark.parametrize("depth", [1, 2])
def test_every_sequence_resumes_alone_with_the_bundled_model(depth: int) -> None:
    """Each is cut at a token of its own; what it counted and drew goes on. Logits of one row and of many differ in their last bits."""
    folder = bundled_path("headrace-tiny")
    assert folder is not None
    whole = sampled("r")
    with RealEngine(folder, depth=depth) as engine:
        engine.run(whole)
        draw = random.Random(depth)
        cuts = {index: draw.randrange(1, len(engine.answer("r", index))) for index in whole.indices}
        parts = [resumed(whole, index, engine.answer("r", index)[:cut]) for index, cut in cuts.items()]
        engine.run(*parts)
        for part in parts:
            index, cut = part.first_index, len(part.output_ids)
            assert engine.answer(part.request_id, index) == engine.answer("r", index)[cut:]
            assert engine.finish[part.request_id, index] == engine.finish["r", index]
            assert_close(engine.logprobs[part.request_id, index], engine.logprobs["r", index][cut:])


def assert_close(left: list[TokenLogprobs], right: list[TokenLogprobs]) -> None:
    def facts(entry: TokenLogprobs) -> object:
        return entry.token_id, entry.rank, entry.top_ids

    assert [facts(entry) for entry in left] == [facts(entry) for entry in right]
    assert [entry.logprob for entry in left] == pytest.approx([entry.logprob for entry in right], abs=1e-4)
