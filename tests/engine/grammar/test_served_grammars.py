"""Tests a whole engine over the bundled model: grammars are prepared, followed, refused and given back, and other requests go on."""

from __future__ import annotations

import json
import re
import time
from collections.abc import Iterator
from typing import Any

import jsonschema
import pytest
from grammar_kit import PERSON, TINY, encode, lark, regex, schema, tokenizer, vetting_here
from patience import PATIENCE_S
from real_engine import RealEngine, greedy_request

from headrace.core.errors import InvalidRequest
from headrace.core.grammar import Grammar
from headrace.core.request import EngineRequest
from headrace.core.update import FinishReason

pytestmark = pytest.mark.socket

BOUNDED = schema(
    '{"type":"object","properties":{"name":{"type":"string","maxLength":8},"age":{"type":"integer","minimum":0,"maximum":99}},'
    '"required":["name","age"],"additionalProperties":false}'
)


@pytest.fixture(scope="module", autouse=True)
def vetted_here() -> Iterator[None]:
    with vetting_here():
        yield


@pytest.fixture(scope="module")
def engine() -> Iterator[RealEngine]:
    with RealEngine(TINY, max_model_len=512) as made:
        yield made


def asked(name: str, grammar: Grammar | None, **changes: Any) -> EngineRequest:
    given: dict[str, Any] = {"ignore_eos": False, "max_tokens": 120, "temperature": 1.0, **changes}
    return greedy_request(name, encode("Write a document: "), grammar=grammar, **given)


def answered(engine: RealEngine, *requests: EngineRequest) -> None:
    """Turn until all have ended, those that wait for a grammar too."""
    engine.submit(*requests)
    deadline = time.monotonic() + PATIENCE_S
    while engine.engine.turn() or engine.engine.scheduler.sequences.has_work:
        assert time.monotonic() < deadline
        time.sleep(0.001)  # leaves a core to the thread that prepares
    engine.check_idle()


def text(engine: RealEngine, name: str, index: int = 0) -> str:
    return tokenizer().join(engine.answer(name, index)).decode()


def test_outputs_follow_their_grammars_beside_an_output_without_one(engine: RealEngine) -> None:
    answered(
        engine,
        asked("schema", BOUNDED, n=3),
        asked("regex", regex("[a-z]{3,5}-[0-9]{2}")),
        asked("lark", lark('start: "x" ("," "y"){2}')),
        asked("free", None, max_tokens=20, ignore_eos=True),
    )
    for index in range(3):
        assert engine.finish["schema", index] is FinishReason.STOP
        jsonschema.validate(json.loads(text(engine, "schema", index)), json.loads(BOUNDED.source))
    assert re.fullmatch("[a-z]{3,5}-[0-9]{2}", text(engine, "regex"))
    assert text(engine, "lark") == "x,y,y"
    assert len(engine.answer("free")) == 20


def test_an_output_that_is_cut_is_a_beginning_of_the_grammar(engine: RealEngine) -> None:
    answered(engine, asked("cut", regex("ab{50}"), max_tokens=3))
    assert engine.finish["cut", 0] is FinishReason.LENGTH
    assert ("a" + "b" * 50).startswith(text(engine, "cut"))


def test_an_end_token_that_alone_is_allowed_ends_the_output_before_min_tokens(engine: RealEngine) -> None:
    answered(engine, asked("short", regex("yes|no"), min_tokens=40))
    assert engine.finish["short", 0] is FinishReason.STOP
    assert text(engine, "short") in ("yes", "no")


def test_a_grammar_that_vetting_refuses_is_a_rejected_request_and_neighbours_go_on(engine: RealEngine) -> None:
    answered(
        engine,
        asked("bad", schema('{"type":"object","dependentRequired":{"a":["b"]}}'), n=4),
        asked("huge", lark("start: " + " | ".join(f"/[a-z]*{i}/" for i in range(2000)))),
        asked("good", BOUNDED),
    )
    assert isinstance(engine.refused["bad"], InvalidRequest)
    assert engine.refused["bad"].field == "grammar"
    assert "dependentRequired" in str(engine.refused["bad"])
    assert "masks stay within their limits" in str(engine.refused["huge"])
    assert not [key for key in engine.finish if key[0] in ("bad", "huge")], "nothing is said of their sequences"
    assert engine.finish["good", 0] is FinishReason.STOP


def test_a_resumed_output_goes_on_within_its_grammar(engine: RealEngine) -> None:
    answered(engine, asked("whole", schema(PERSON), max_tokens=60, seed=3))
    whole = engine.answer("whole")
    request = asked("part", schema(PERSON), max_tokens=60, seed=3)
    answered(engine, request.resumed(0, whole[:7], engine.engine.info.numerics_digest))
    assert text(engine, "whole").startswith(tokenizer().join(whole[:7]).decode())
    assert tokenizer().join([*whole[:7], *engine.answer("part")]).decode().startswith("{")
    assert engine.errors == {}


def test_a_cancelled_request_gives_its_grammar_back(engine: RealEngine) -> None:
    endless = asked("gone", regex("[a-z]+"), max_tokens=400)
    engine.submit(endless)
    while not engine.answer("gone"):
        engine.engine.turn()
    engine.engine.cancel(endless.request_id)
    answered(engine)
    assert engine.finish["gone", 0] is FinishReason.CANCELLED
    preparer: Any = engine.engine._preparations._preparer._grammars  # type: ignore[attr-defined]
    assert not preparer._open
    assert all(not held.num_pins for held in preparer._store._compiled.values())
    preparer._store.check()
