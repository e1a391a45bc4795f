"""A seed decides a request's tokens, not its neighbours: alone or among 31 random ones, in float32, the samples are the same."""

from __future__ import annotations

import random
from typing import Any

import pytest
from plain_loop import Checkpoint
from real_engine import RealEngine, greedy_request

from headrace.core.request import EngineRequest

pytestmark = pytest.mark.pure

COUNT = 12
CROWD: dict[str, Any] = {"max_num_seqs": 32, "max_num_batched_tokens": 128, "num_kv_blocks": 1200}
WAYS: tuple[dict[str, Any], ...] = (
    {"temperature": 1.5},
    {"temperature": 0.7, "top_p": 0.9},
    {"temperature": 1.3, "top_k": 12, "min_p": 0.02},
    {"temperature": 0.9, "presence_penalty": 0.8, "frequency_penalty": 0.4, "repetition_penalty": 1.2, "logit_bias": {7: 2.0}},
    {"temperature": 1.0, "n": 3},
)


def watched(checkpoint: Checkpoint) -> list[EngineRequest]:
    """One request per way of sampling, hot enough that a trained model, sure of its answers, does not always give the greedy one."""
    heat = 1.0 if checkpoint.name == "random" else 4.0
    return [
        greedy_request(
            f"w{number}",
            checkpoint.prompts[number],
            max_tokens=COUNT,
            seed=100 + number,
            **{**way, "temperature": min(2.0, heat * way["temperature"])},
        )
        for number, way in enumerate(WAYS)
    ]


def neighbours(checkpoint: Checkpoint, draw: random.Random) -> list[EngineRequest]:
    return [
        greedy_request(
            f"n{number}",
            draw.choice(checkpoint.prompts)[: draw.randint(1, 30)],
            max_tokens=draw.randint(1, 2 * COUNT),
            temperature=draw.choice([0.0, draw.uniform(0.1, 2.0)]),
            top_p=draw.uniform(0.2, 1.0),
            top_k=draw.choice([0, 3, 40]),
            presence_penalty=draw.uniform(-1, 1),
            seed=draw.randrange(2**62),
        )
        for number in range(31)
    ]


@pytest.mark.parametrize("checkpoint", ["random", pytest.param("trained", marks=pytest.mark.slow)], indirect=True)
@pytest.mark.parametrize("depth", [1, pytest.param(2, marks=pytest.mark.slow)])
def test_a_seeded_request_samples_the_same_alone_and_in_a_crowd(checkpoint: Checkpoint, depth: int) -> None:
    draw = random.Random(3)
    num_greedy = 0
    with RealEngine(checkpoint.folder, depth=depth, **CROWD) as engine:
        for request in watched(checkpoint):
            keys = [(str(request.request_id), index) for index in range(request.params.n)]
            engine.run(request)
            alone = [engine.tokens.pop(key) for key in keys]
            for key in keys:
                del engine.finish[key]
            crowd = neighbours(checkpoint, draw)
            place = draw.randrange(32)
            engine.run(*crowd[:place], request, *crowd[place:])
            assert [engine.tokens[key] for key in keys] == alone
            num_greedy += sum(answer == checkpoint.plain.greedy(request.prompt_ids, COUNT) for answer in alone)
            engine.tokens.clear()
            engine.finish.clear()
    # A sampled answer of a trained model may be the greedy one by chance, even this hot.
    assert num_greedy <= (0 if checkpoint.name == "random" else 2)


@pytest.mark.parametrize("checkpoint", ["random"], indirect=True)
def test_another_seed_samples_something_else(checkpoint: Checkpoint) -> None:
    prompt = checkpoint.prompts[0]
    with RealEngine(checkpoint.folder) as engine:
        engine.run(*(greedy_request(f"r{seed}", prompt, temperature=1.0, seed=seed, max_tokens=COUNT) for seed in range(6)))
        assert len({tuple(answer) for answer in engine.tokens.values()}) == 6
