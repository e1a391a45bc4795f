"""Tests prerequisites: a preparer names them, answers for them, and releases what it prepared once the request is over."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping
from typing import Any

import pytest
from engine_kit import VOCAB, DrivenEngine, NotedPreparer, request
from hypothesis import given, settings
from hypothesis import strategies as st
from kv_oracle import expected_tokens

from headrace.core.errors import EngineFatal, HeadraceError, InvalidRequest, Overloaded, RequestTooLarge, Unavailable
from headrace.core.grammar import Grammar, GrammarKind
from headrace.core.ids import PreparationId, RequestId
from headrace.core.request import EngineRequest
from headrace.core.update import FinishReason
from headrace.engine.preparation import Preparers
from headrace.policy.schedule.sequence_table import SequenceTable

pytestmark = pytest.mark.pure


@pytest.mark.parametrize("n", [1, 3])
def test_each_prerequisite_has_a_time_limit_of_its_own(n: int) -> None:
    driven = DrivenEngine()
    for name in ("slow", "quick"):
        driven.submit(request(name, [1 if name == "slow" else 2], n=n if name == "slow" else 1))
        driven.preparer.needs[name] = {"grammar": 2.0, "adapter": 30.0}
    driven.turn()
    driven.satisfied("quick", "grammar")
    driven.turn()
    driven.clock.now += 3.0
    driven.turn()
    late = driven.errors["slow"]
    assert isinstance(late, Unavailable), "the request is fine: it can be sent again"
    assert "(grammar) was not ready within 2 s" in str(late)
    assert not driven.finish, "a late request is refused whole, and the other one still waits"
    driven.satisfied("quick", "adapter")
    driven.run()
    assert driven.tokens["quick", 0] == expected_tokens([2], 8, VOCAB)
    driven.preparer.check_idle()
    driven.scheduler.check()


@pytest.mark.parametrize("n", [1, 3])
def test_a_prerequisite_that_fails_ends_its_request_alone(n: int, caplog: pytest.LogCaptureFixture) -> None:
    driven = DrivenEngine()
    driven.submit(request("a", [1], n=n), request("b", [2], n=n), needs=frozenset({"kv", "grammar"}))
    driven.turn()
    driven.failed("a", "kv", RuntimeError("peer at 10.0.0.7 hung up"))
    driven.failed("a", "kv", RuntimeError("said twice"))
    driven.engine.failed(PreparationId(99), "kv", RuntimeError("not here"))
    driven.failed("b", "unheard of", RuntimeError("not awaited"))
    for what in ("kv", "grammar"):
        driven.satisfied("b", what)
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
    driven.failed("a", "grammar", HeadraceError("a rule refers to itself"))
    driven.run()
    assert str(driven.errors["a"]) == "prerequisite failed: grammar: a rule refers to itself"
    assert not driven.engine.snapshot().counters.failures


class Refusing(NotedPreparer):
    """Cannot prepare one request, and returns what nobody may name for another."""

    def __init__(self, name: str, error: Exception | None = None, wrong: Mapping[str, float] | None = None) -> None:
        super().__init__()
        self.name, self.error, self.wrong = name, error, wrong

    def begin(self, request: EngineRequest, preparation_id: PreparationId) -> Mapping[str, float]:
        if request.request_id == self.name and self.error is not None:
            raise self.error
        found = super().begin(request, preparation_id)
        return self.wrong if request.request_id == self.name and self.wrong is not None else found


def refusing(preparer: NotedPreparer) -> DrivenEngine:
    driven = DrivenEngine()
    driven.preparer = driven.engine._preparations._preparer = preparer
    return driven


def test_a_request_that_cannot_be_prepared_is_refused_and_nothing_is_held_for_it() -> None:
    driven = refusing(Refusing("a", InvalidRequest("grammar", "a grammar this engine knows", "x")))
    driven.submit(request("a", [1]), request("b", [2]))
    driven.run()
    assert isinstance(driven.errors["a"], InvalidRequest)
    assert driven.finish == {("b", 0): FinishReason.LENGTH}
    assert len(driven.preparer.begun) == 1


@pytest.mark.parametrize("n", [1, 3])
@pytest.mark.parametrize("error", [InvalidRequest("grammar", "a better one"), Overloaded("no room for it")], ids=["invalid", "no room"])
def test_a_request_whose_prerequisite_shows_that_it_is_invalid_is_refused_whole(n: int, error: HeadraceError) -> None:
    """Nothing is said of its sequences: the client reads the error as if the request had been refused on arrival."""
    driven = DrivenEngine()
    driven.submit(request("a", [1], n=n), needs=frozenset({"grammar", "kv"}))
    driven.submit(request("b", [2]))
    driven.turn(1)
    driven.satisfied("a", "kv")
    driven.failed("a", "grammar", error)
    driven.failed("a", "grammar", error)
    driven.run()
    assert driven.errors["a"] is error
    assert set(driven.finish) == {("b", 0)}
    driven.preparer.check_idle()
    driven.scheduler.check()


def test_an_engine_that_prepares_nothing_refuses_grammars_and_adapters_by_name() -> None:
    driven = DrivenEngine()
    driven.engine._preparations._preparer = Preparers(None, None)
    driven.submit(request("a", [1], grammar=Grammar(GrammarKind.REGEX, "[0-9]+"), ignore_eos=False), request("b", [2]))
    driven.submit(request("c", [1], adapter="pirate", adapter_digest="ab"))
    driven.run()
    assert str(driven.errors["a"]).startswith("grammar: expected none: this engine compiles no grammars")
    assert isinstance(driven.errors["c"], Unavailable)
    assert str(driven.errors["c"]).startswith("this engine serves the base model only, not pirate")
    assert driven.finish == {("b", 0): FinishReason.LENGTH}


def test_what_was_prepared_is_kept_while_a_step_in_flight_names_its_request() -> None:
    driven = DrivenEngine(depth=2)
    driven.submit(request("a", [1], max_tokens=40), request("b", [2], max_tokens=40))
    driven.turn(4)
    driven.engine.cancel(RequestId("a"))
    planned = driven.kv.steps.last_planned
    assert planned > driven.kv.steps.last_committed
    while not driven.preparer.ended:
        driven.turn()
    assert driven.finish["a", 0] is FinishReason.CANCELLED
    assert driven.kv.steps.last_committed >= planned
    driven.run()


@pytest.mark.parametrize("name", ["headrace.fork", "headrace.host_kv", "headrace.anything"])
def test_names_of_the_scheduler_are_no_preparers(name: str) -> None:
    """A preparer that names one has a bug: its request ends and gives back what it holds. One that answers one is refused at once."""
    driven = refusing(Refusing("a", wrong={name: 5.0}))
    driven.submit(request("a", [1]), request("b", [2, 3], n=2))
    driven.turn()
    with pytest.raises(ValueError, match="the scheduler's own"):
        driven.satisfied("b", name)
    with pytest.raises(ValueError, match="the scheduler's own"):
        driven.failed("b", name, RuntimeError("x"))
    driven.run()
    assert "a" in driven.errors
    assert driven.finish == {("b", 0): FinishReason.LENGTH, ("b", 1): FinishReason.LENGTH}


def test_a_late_answer_for_a_cancelled_request_says_nothing_of_the_next_one_of_its_id() -> None:
    """The id and even the epoch are the same: only the preparation tells them apart."""
    driven = DrivenEngine()
    driven.submit(request("a", [1]), needs=frozenset({"grammar"}))
    driven.turn()
    first = driven.preparer.preparation_ids["a"]
    driven.engine.cancel(RequestId("a"))
    driven.turn()
    assert driven.finish.pop(("a", 0)) is FinishReason.CANCELLED
    driven.submit(request("a", [5]), needs=frozenset({"grammar"}))
    driven.turn()
    driven.engine.satisfied(first, "grammar")
    driven.turn(3)
    assert not driven.tokens["a", 0], "its own grammar is not there yet"
    driven.engine.failed(first, "grammar", HeadraceError("the grammar of the first one is broken"))
    driven.turn(3)
    assert ("a", 0) not in driven.finish
    driven.satisfied("a", "grammar")
    driven.run()
    assert driven.tokens["a", 0] == expected_tokens([5], 8, VOCAB)


def test_an_answer_and_a_cancel_that_cross_leave_the_next_request_alone() -> None:
    """All in one drain of the inbox: cancelled, submitted anew, and the first one's answer after it."""
    driven = DrivenEngine()
    driven.submit(request("a", [1]), needs=frozenset({"grammar"}))
    driven.turn()
    driven.engine.cancel(RequestId("a"))
    driven.submit(request("a", [5]), needs=frozenset({"grammar"}))
    driven.satisfied("a", "grammar")
    driven.finish.clear()
    driven.engine._outbox = lambda _: None
    driven.turn(3)
    (waiting,) = driven.scheduler.sequences.alive()
    assert list(waiting.missing) == ["grammar"]


FULL_QUEUE = {"max_waiting": 2, "max_num_seqs": 1}


@pytest.mark.parametrize(
    ("config", "refused", "error"),
    [
        (FULL_QUEUE, request("late", [9], tenant="t"), Overloaded),
        ({"max_waiting": 4}, request("late", [9], n=5), RequestTooLarge),
        ({"num_blocks": 5}, request("late", [9], max_tokens=60), RequestTooLarge),
        ({}, request("a", [9]), HeadraceError),
    ],
    ids=["a full queue", "more sequences than may wait", "more than fits the cache", "an id in use"],
)
def test_nothing_is_prepared_for_a_request_that_is_refused(config: dict[str, Any], refused: EngineRequest, error: type[Exception]) -> None:
    driven = DrivenEngine(**config)
    driven.submit(*(request(name, [1, 2], tenant="t", max_tokens=4) for name in ("a", "b")), needs=frozenset({"grammar"}))
    driven.turn()
    driven.submit(*[refused] * 50, needs=frozenset({"grammar"}))
    driven.turn()
    assert isinstance(driven.errors[refused.request_id], error)
    assert len(driven.preparer.begun) == 2
    for name in ("a", "b"):
        driven.engine.satisfied(PreparationId(1 if name == "a" else 2), "grammar")
    driven.run()


@pytest.mark.parametrize(
    ("what", "end"),
    [
        ("cancelled while it waits", lambda driven: driven.engine.cancel(RequestId("a"))),
        ("failed", lambda driven: driven.failed("a", "kv", HeadraceError("no"))),
        ("never came", lambda driven: setattr(driven.clock, "now", driven.clock.now + 100)),
        ("finished", lambda driven: driven.satisfied("a", "kv")),
        ("stopped by its text", lambda driven: [driven.engine.finish(RequestId("a"), index, 0) for index in range(3)]),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_what_was_prepared_is_given_back_once_when_the_last_sequence_has_ended(what: str, end: Callable[[DrivenEngine], object]) -> None:
    driven = DrivenEngine()
    driven.submit(request("a", [1], n=3), needs=frozenset({"kv"}))
    driven.submit(request("b", [2]))
    driven.turn()
    driven.engine.finish(RequestId("a"), 1, 0)
    driven.turn()
    assert driven.preparer.ended[driven.preparer.preparation_ids["a"]] == 0, "two of its sequences go on"
    end(driven)
    driven.run()
    is_refused = what == "never came"
    assert len(driven.finish) == (2 if is_refused else 4)
    assert isinstance(driven.errors.get("a"), Unavailable) == is_refused


@pytest.mark.parametrize(("owner", "method"), [(SequenceTable, "add"), (SequenceTable, "_place")])
def test_a_request_that_cannot_be_added_gives_back_what_was_prepared(owner: type, method: str, monkeypatch: pytest.MonkeyPatch) -> None:
    driven = DrivenEngine()
    with monkeypatch.context() as patch:
        patch.setattr(owner, method, broken)
        driven.submit(request("a", [1]))
        driven.turn()
    assert driven.preparer.ended[driven.preparer.preparation_ids["a"]] == 1
    driven.run()


def broken(*_: object, **__: object) -> None:
    raise RuntimeError("planted")


def test_an_answer_that_cannot_be_handled_ends_its_request_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    driven = DrivenEngine()
    driven.submit(request("a", [1], n=2), request("b", [2]), needs=frozenset({"kv"}))
    driven.turn()
    with monkeypatch.context() as patch:
        patch.setattr(SequenceTable, "_place", broken)
        driven.satisfied("a", "kv")
        driven.turn()
    driven.satisfied("b", "kv")
    driven.run()
    assert driven.finish["a", 0] is driven.finish["a", 1] is FinishReason.CANCELLED
    assert driven.tokens["b", 0] == expected_tokens([2], 8, VOCAB)
    assert driven.engine.snapshot().counters.failures == {"message": 1}


class Leaking(NotedPreparer):
    def end(self, preparation_id: PreparationId) -> None:
        super().end(preparation_id)
        raise OSError("cannot be unmapped")


def test_a_preparer_that_cannot_give_back_is_logged_and_harms_nobody(caplog: pytest.LogCaptureFixture) -> None:
    driven = refusing(Leaking())
    driven.submit(request("a", [1]), request("b", [2]))
    driven.run()
    assert set(driven.finish.values()) == {FinishReason.LENGTH}
    assert driven.engine.snapshot().counters.failures == {"prerequisite": 2}
    assert "cannot be unmapped" in caplog.text


class Wrecked(NotedPreparer):
    def end(self, preparation_id: PreparationId) -> None:
        super().end(preparation_id)
        raise EngineFatal("the device is lost")


def test_a_preparer_that_finds_the_engine_lost_ends_it_and_still_ends_every_request() -> None:
    driven = refusing(Wrecked())
    closed: list[bool] = []
    driven.runner.close = lambda: closed.append(True)  # type: ignore[method-assign]
    driven.submit(request("a", [1]), request("b", [2]), request("c", [3], max_tokens=40))
    with pytest.raises(EngineFatal, match="the device is lost"):
        driven.engine.run()
    assert driven.preparer.ended == Counter(driven.preparer.begun)
    assert len(driven.preparer.begun) == 3
    assert closed == [True]


@pytest.mark.parametrize("is_fatal", [False, True])
def test_an_engine_that_ends_gives_everything_back(is_fatal: bool) -> None:
    driven = DrivenEngine()
    driven.submit(request("a", [1]), request("b", [2]), needs=frozenset({"kv"}))
    driven.submit(request("c", [3], max_tokens=40))
    driven.turn(2)
    if is_fatal:
        driven.runner.compute = broken  # type: ignore[assignment]
        with pytest.raises(EngineFatal):
            driven.engine.run()
    else:
        driven.engine.stop()
        driven.engine.run()
    assert driven.preparer.ended == Counter(driven.preparer.begun)
    assert len(driven.preparer.begun) == 3


@settings(max_examples=60, deadline=None)
@given(moves=st.lists(st.tuples(st.sampled_from(["submit", "cancel", "answer", "fail", "turn", "wait"]), st.integers(0, 3)), max_size=60))
def test_ids_that_come_again_are_told_apart_and_nothing_is_held_in_the_end(moves: list[tuple[str, int]]) -> None:
    """Four ids, used again and again; answers are for the oldest preparation that has had none, as a slow worker's would be."""
    driven = DrivenEngine(max_num_seqs=2, max_waiting=3, prerequisite_timeout_s=20.0)
    driven.engine._outbox = lambda _: None  # the kit wants each id once
    answered = 0
    for move, which in moves:
        name = RequestId(f"r{which}")
        if move == "submit":
            driven.submit(request(name, [which + 1], max_tokens=4, n=1 + which % 2), needs=frozenset({"kv"}))
        elif move == "cancel":
            driven.engine.cancel(name)
        elif move in ("answer", "fail") and answered < len(driven.preparer.begun):
            preparation_id = driven.preparer.begun[answered]
            waiting = {
                seq.preparation_id: list(seq.missing) for seq in driven.scheduler.sequences.alive() if seq.preparation_id != preparation_id
            }
            answered += 1
            driven.engine.satisfied(preparation_id, "kv") if move == "answer" else driven.engine.failed(
                preparation_id, "kv", HeadraceError("no")
            )
            driven.engine._take_messages()
            after = {seq.preparation_id: list(seq.missing) for seq in driven.scheduler.sequences.alive()}
            assert all(after.get(other, missing) == missing for other, missing in waiting.items()), "another request's answer counted"
        elif move == "turn":
            driven.turn(2)
        else:
            driven.clock.now += 7.0
        driven.scheduler.check()
    driven.turn()
    driven.clock.now += 100.0
    driven.run()
