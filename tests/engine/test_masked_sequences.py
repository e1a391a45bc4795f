"""Tests that sequences with a grammar give the same tokens and log-probabilities, to the bit, alone and beside any other requests.

The engine is deterministic, so that its logits do not depend on the batch; everything else about a grammar must not, either.
"""

from __future__ import annotations

import json
import random
import re
from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import cache, partial
from pathlib import Path
from typing import Any

import pytest
from grammar_kit import vetting_here
from grammar_samples import is_document
from real_engine import Answers, RealEngine, greedy_request, resumed_anywhere

pytest.importorskip("numba")

from failpoint_kit import armed

from headrace.bundled import bundled_path
from headrace.core.grammar import Grammar, GrammarKind
from headrace.core.ids import RequestId
from headrace.core.request import EngineRequest
from headrace.core.update import FinishReason
from headrace.text.tokenizer import Tokenizer

pytestmark = pytest.mark.socket

PERSON = {
    "type": "object",
    "properties": {
        "name": {"type": "string", "maxLength": 8},
        "age": {"type": "integer", "minimum": 0, "maximum": 130},
        "tags": {"type": "array", "items": {"enum": ["a", "bc", "é"]}, "maxItems": 2},
    },
    "required": ["name", "age", "tags"],
    "additionalProperties": False,
}
SHAPES: list[dict[str, Any]] = [
    {"temperature": 0.0},
    {},
    {"top_p": 0.9, "logprobs": 3},
    {"presence_penalty": 0.6, "frequency_penalty": 0.3, "repetition_penalty": 1.2},
    {"n": 3, "top_k": 40},
    {"temperature": 0.0, "logit_bias": {70: 9.0, 2: 20.0}, "logprobs": 1},
    {"min_tokens": 12, "min_p": 0.01},
    {"prompt_logprobs": 1, "temperature": 1.6},
]
GRAMMARS = [
    Grammar(GrammarKind.JSON_SCHEMA, json.dumps(PERSON)),
    Grammar(GrammarKind.REGEX, r"[a-f]{3,9}(-[0-9]{2}){1,4}!?"),
    Grammar(GrammarKind.LARK, 'start: item ("," item){0,5}\nitem: /[a-z]{1,4}/ | "(" item ")"'),
    Grammar.choice(["yes, of course", "yes", "no"]),
]
MATCHES: list[Callable[[str], object]] = [
    partial(is_document, PERSON),
    re.compile(GRAMMARS[1].source).fullmatch,
    re.compile(r"(\(*[a-z]{1,4}\)*)(,\(*[a-z]{1,4}\)*){0,5}").fullmatch,
    ("yes, of course", "yes", "no").__contains__,
]
"""Checks of whole outputs, one for each of GRAMMARS, that share no code with it; brackets of the third are not counted."""
ROOM: dict[str, Any] = {"deterministic": True, "dtype": "auto", "max_model_len": 104, "max_num_batched_tokens": 64}


@pytest.fixture(scope="module", autouse=True)
def vetted_here() -> Iterator[None]:
    with vetting_here():
        yield


@cache
def tiny() -> Path:
    folder = bundled_path("headrace-tiny")
    assert folder is not None
    return folder


@cache
def tokenizer() -> Tokenizer:
    return Tokenizer.load(tiny())


def requests() -> list[EngineRequest]:
    """Every shape, with a grammar each and without one now and then; prompts of many lengths, some with a common beginning."""
    made = []
    for number in range(12):
        prompt = tokenizer().encode("Write something about the sea and " * (1 + number % 3) + str(number), add_special_tokens=True)
        grammar = None if number % 5 == 4 else GRAMMARS[number % len(GRAMMARS)]
        fixed = {"seed": 100 + number, "max_tokens": 60, "ignore_eos": grammar is None}
        shape = {"temperature": 1.0, **fixed, **SHAPES[number % len(SHAPES)]}
        made.append(greedy_request(f"r{number}", prompt, grammar=grammar, **shape))
    return made


BUNDLED = pytest.param({}, id="bundled")
RANDOM = pytest.param({"load_format": "dummy", "seed": 3}, id="random weights")
of_random_weights = pytest.mark.parametrize("weights", [RANDOM], indirect=True)
"""Of them all texts are different; those of the bundled model are the same in many sequences."""


@pytest.fixture(scope="module", params=[BUNDLED, RANDOM])
def weights(request: pytest.FixtureRequest) -> dict[str, Any]:
    given: dict[str, Any] = request.param
    return given


@pytest.fixture(scope="module")
def alone(weights: dict[str, Any]) -> Answers:
    """Each request on its own, one sequence in a step, without prefix caching: the oracle of this page."""
    with RealEngine(tiny(), **ROOM, **weights, enable_prefix_caching=False, max_num_seqs=1) as engine:
        for request in requests():
            engine.run(request)
        return engine.answers()


def text_of(token_ids: list[int]) -> str:
    return tokenizer().join([token for token in token_ids if token not in (0, 2)]).decode()


def test_alone_they_are_what_their_grammars_say(alone: Answers) -> None:
    """What ends by itself is complete and valid, and what was cut off had no end token."""
    num_complete = 0
    for request in requests():
        for index in request.indices:
            answer = alone[str(request.request_id), index]
            if request.grammar is None or answer.finish is not FinishReason.STOP:
                continue
            num_complete += 1
            text = text_of(answer.token_ids)
            assert MATCHES[GRAMMARS.index(request.grammar)](text), (request.grammar, text)
    assert num_complete >= 6, "how many end by themselves differs with the dtype that the CPU computes in"


TOGETHER: dict[str, dict[str, Any]] = {
    "batched": {},
    "overlapped": {"depth": 2},
    "chunked": {"max_num_batched_tokens": 9, "max_num_seqs": 4},
    "preempted": {"num_kv_blocks": 27, "max_num_seqs": 12},
    "preempted and overlapped": {"num_kv_blocks": 27, "max_num_seqs": 12, "depth": 2},
    "two threads": {"kernels": "numba", "num_threads": 2, "enable_prefix_caching": False},
}


@of_random_weights
@pytest.mark.parametrize("config", TOGETHER.values(), ids=TOGETHER)
def test_together_they_are_the_same(alone: Answers, weights: dict[str, Any], config: dict[str, Any]) -> None:
    with RealEngine(tiny(), **{**ROOM, **weights, **config}) as engine:
        engine.run(*requests())
        assert engine.answers() == alone
        assert (engine.preemptions > 0) == ("num_kv_blocks" in config)


@pytest.mark.parametrize("weights", [BUNDLED], indirect=True)
def test_those_of_the_bundled_model_are_the_same_too(alone: Answers, weights: dict[str, Any]) -> None:
    test_together_they_are_the_same(alone, weights, TOGETHER["preempted and overlapped"])


@of_random_weights
def test_a_prefix_hit_changes_nothing(alone: Answers, weights: dict[str, Any]) -> None:
    with RealEngine(tiny(), **ROOM, **weights) as engine:
        engine.run(*[replace(request, request_id=RequestId(f"first {request.request_id}")) for request in requests()])
        engine.run(*requests())
        again = {key: answer for key, answer in engine.answers().items() if key in alone}
        assert again == alone
        assert sum(engine.cached[str(request.request_id)] > 0 for request in requests()) >= 6


@of_random_weights
@pytest.mark.parametrize("depth", [1, 2])
def test_resumed_after_any_token_they_go_on_the_same(alone: Answers, weights: dict[str, Any], depth: int) -> None:
    parts, expected = resumed_anywhere(requests(), alone, random.Random(depth))
    with RealEngine(tiny(), **ROOM, **weights, depth=depth) as engine:
        engine.run(*parts)
        assert engine.answers() == expected


@of_random_weights
@pytest.mark.parametrize("site", ["runner.masks", "runner.forward", "runner.sample", "runner.commit", "grammar.fill"])
def test_a_step_that_failed_and_was_repeated_changes_nothing(alone: Answers, weights: dict[str, Any], site: str) -> None:
    """A step in the middle raises, and its rows are repeated in halves. The step after it, computed already, is rolled back."""
    with RealEngine(tiny(), **ROOM, **weights, depth=2) as engine, armed(site, skip=9) as fault:
        engine.run(*requests())
        assert fault.hits == 1
        assert engine.answers() == alone


@of_random_weights
def test_a_sequence_whose_outputs_do_not_match_ends_alone(alone: Answers, weights: dict[str, Any]) -> None:
    """A resume may bring anything: output ids that the grammar does not allow end that sequence, and its neighbours go on."""
    spoilt = replace(requests()[0].resumed(0, tokenizer().encode("not JSON", add_special_tokens=False), ""), request_id=RequestId("spoilt"))
    with RealEngine(tiny(), **ROOM, **weights) as engine:
        engine.run(spoilt, *requests())
        assert "grammar" in engine.errors.pop("spoilt")
        assert engine.finish.pop(("spoilt", 0)) is FinishReason.ERROR
        assert engine.answers() == alone
