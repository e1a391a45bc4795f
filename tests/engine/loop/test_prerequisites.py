"""What a request waits for is the engine's business: `prepare` names it, `satisfied` and `failed` say what became of it."""

from __future__ import annotations

import pytest
from engine_kit import VOCAB, DrivenEngine, request
from kv_oracle import expected_tokens

from headrace.core.errors import HeadraceError, InvalidRequest
from headrace.core.finish import FinishReason
from headrace.core.ids import RequestId
from headrace.core.request import EngineRequest


def test_each_prerequisite_has_a_time_limit_of_its_own() -> None:
    driven = DrivenEngine()
    driven.engine._prepare = lambda one: {"grammar": 2.0, "adapter": 30.0}
    driven.submit(request("slow", [1]), request("quick", [2]))
    driven.turn()
    driven.engine.satisfied(RequestId("quick"), "grammar")
    driven.turn()
    driven.clock.now += 3.0
    driven.turn()
    assert str(driven.errors["slow"]) == "prerequisite not met in 2 s: grammar"
    assert ("quick", 0) not in driven.finish
    driven.engine.satisfied(RequestId("quick"), "adapter")
    driven.run()
    assert driven.tokens["quick", 0] == expected_tokens([2], 8, VOCAB)


@pytest.mark.parametrize("n", [1, 3])
def test_a_prerequisite_that_fails_ends_its_request_alone(n: int, caplog: pytest.LogCaptureFixture) -> None:
    driven = DrivenEngine()
    driven.submit(request("a", [1], n=n), request("b", [2], n=n), needs=frozenset({"kv", "grammar"}))
    driven.turn()
    driven.engine.failed(RequestId("a"), "kv", RuntimeError("peer at 10.0.0.7 hung up"))
    driven.engine.failed(RequestId("a"), "kv", RuntimeError("said twice"))
    driven.engine.failed(RequestId("gone"), "kv", RuntimeError("not here"))
    driven.engine.failed(RequestId("b"), "unheard of", RuntimeError("not awaited"))
    for what in ("kv", "grammar"):
        driven.engine.satisfied(RequestId("b"), what)
    driven.run()
    assert [driven.finish["a", index] for index in range(n)] == [FinishReason.ERROR] * n
    assert "10.0.0.7" not in str(driven.errors["a"])
    assert "10.0.0.7" in caplog.text
    assert driven.engine.snapshot().counters.failures["prerequisite"] == 4
    assert [driven.finish["b", index] for index in range(n)] == [FinishReason.LENGTH] * n


def test_a_client_reads_what_is_wrong_with_its_own_request() -> None:
    driven = DrivenEngine()
    driven.submit(request("a", [1]), needs=frozenset({"grammar"}))
    driven.turn()
    driven.engine.failed(RequestId("a"), "grammar", HeadraceError("a rule refers to itself"))
    driven.run()
    assert str(driven.errors["a"]) == "prerequisite failed: grammar: a rule refers to itself"
    assert not driven.engine.snapshot().counters.failures


def test_a_request_that_cannot_be_prepared_is_refused() -> None:
    driven = DrivenEngine()

    def refuse(one: EngineRequest) -> dict[str, float]:
        if one.request_id == "a":
            raise InvalidRequest("grammar", "a grammar this engine knows", "x")
        return {}

    driven.engine._prepare = refuse
    driven.submit(request("a", [1]), request("b", [2]))
    driven.run()
    assert isinstance(driven.errors["a"], InvalidRequest)
    assert driven.finish == {("b", 0): FinishReason.LENGTH}
