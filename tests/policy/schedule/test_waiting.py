"""Tests the bounds of the waiting queue, and what they count."""

from __future__ import annotations

import tracemalloc
from collections import Counter
from types import ModuleType

import pytest
from engine_kit import DrivenEngine, request

from headrace.core import request as core_request
from headrace.core.errors import Overloaded, RequestTooLarge
from headrace.core.grammar import Grammar, GrammarKind
from headrace.core.ids import RequestId
from headrace.core.request import EngineRequest, PriorityClass, TierTerms, request_bytes, submitted_bytes
from headrace.core.update import FinishReason
from headrace.engine import inbox
from headrace.policy.schedule import sequence_table
from headrace.wire.codec import decode_submit, encode_submit
from headrace.wire.service import Handle

pytestmark = pytest.mark.pure

SCHEMA = Grammar(GrammarKind.JSON_SCHEMA, '{"type":"object","title":"' + "x" * 20_000 + '"}')


def long(name: str, num_tokens: int = 400, **changes: object) -> EngineRequest:
    return request(name, [i % 90 for i in range(num_tokens)], **changes)


def test_a_request_beyond_the_bytes_is_refused_by_name_until_others_leave_the_queue() -> None:
    one = submitted_bytes(long("a"))
    driven = DrivenEngine(max_num_seqs=1, max_model_len=512, num_blocks=256, max_waiting_bytes=3 * one, max_num_batched_tokens=512)
    driven.submit(long("runs", max_tokens=4))
    driven.turn()
    driven.submit(*(long(f"w{i}", max_tokens=4) for i in range(3)))
    driven.turn()
    assert not driven.errors
    assert sum(driven.scheduler.sequences.waiting.num_bytes) == 3 * one
    driven.submit(long("late"))
    driven.turn()
    refusal = driven.errors["late"]
    assert isinstance(refusal, Overloaded)
    assert f"waiting requests hold {3 * one} of {3 * one} bytes, and this one would add {one}" in str(refusal)
    assert refusal.retry_after_s > 0
    driven.engine.cancel(RequestId("w1"))
    driven.submit(long("again", max_tokens=4))
    driven.run()
    assert driven.finish["again", 0] is FinishReason.LENGTH
    assert sum(driven.scheduler.sequences.waiting.num_bytes) == 0


@pytest.mark.parametrize(
    "changes",
    [{"num_tokens": 500}, {"grammar": SCHEMA}, {"logit_bias": dict.fromkeys(range(90), 1.0)}, {"stop": ("y" * 9000,)}, {"n": 4}],
    ids=["prompt", "grammar", "logit_bias", "stop", "n"],
)
def test_whatever_makes_a_request_too_large_to_wait_is_counted(changes: dict[str, object]) -> None:
    most = submitted_bytes(long("fits", 1)) + 4_000
    driven = DrivenEngine(max_model_len=512, num_blocks=256, max_waiting_bytes=most)
    big = long("big", **({"num_tokens": 1} | changes))  # type: ignore[arg-type]
    driven.submit(big)
    driven.submit(long("fits", 1, max_tokens=2))
    driven.run()
    refusal = driven.errors["big"]
    assert isinstance(refusal, RequestTooLarge)
    assert (refusal.field, refusal.given) == ("prompt", submitted_bytes(big))
    assert f"at most {most} bytes while it waits" in str(refusal)
    assert "Shorten" in refusal.remedy
    assert driven.finish["fits", 0] is FinishReason.LENGTH


@pytest.mark.parametrize("policy", ["priority", "fair"])
def test_a_queue_full_of_batch_requests_refuses_no_premium_one(policy: str) -> None:
    """Where the policy has classes. Where it has none, a premium request would wait behind all of them."""
    batch, premium = PriorityClass.BATCH, PriorityClass.PREMIUM
    most = 2 * submitted_bytes(request("b", [1]))
    driven = DrivenEngine(max_num_seqs=1, max_waiting=8, max_waiting_bytes=most, queue_policy=policy)
    driven.submit(request("runs", [1]))
    driven.turn()
    driven.submit(*(request(f"b{i}", [1], priority=batch) for i in range(2)))
    driven.turn()
    driven.submit(request("b2", [1], priority=batch), request("p", [1], priority=premium))
    driven.run()
    assert sorted(driven.errors) == (["b2"] if policy == "priority" else ["b2", "p"])


def test_a_preempted_sequence_waits_again_with_all_its_bytes() -> None:
    driven = DrivenEngine(max_num_seqs=2)
    driven.submit(request("a", [1, 2, 3], max_tokens=30))
    driven.turn(4)
    waiting, (seq,) = driven.scheduler.sequences.waiting, driven.scheduler.sequences.slots.running
    assert sum(waiting.num_bytes) == 0
    driven.scheduler.sequences.preempt(seq, driven.clock.now)
    assert sum(waiting.num_bytes) > submitted_bytes(seq.request), "the tokens that it has generated are held, too"
    driven.scheduler.check()
    driven.run()
    assert sum(waiting.num_bytes) == 0


def test_siblings_that_wait_hold_their_own_tokens_and_not_the_request_again() -> None:
    driven = DrivenEngine(max_num_seqs=1)
    driven.submit(request("a", list(range(20)), n=3))
    driven.turn()
    waiting, whole = driven.scheduler.sequences.waiting, submitted_bytes(request("a", list(range(20)), n=3))
    each = (whole - request_bytes(request("a", list(range(20)), n=3))) // 3
    assert sum(waiting.num_bytes) == 2 * each
    driven.run()


def test_what_is_handed_in_during_a_step_is_bounded_by_the_same_bytes() -> None:
    """The loop takes nothing while a step runs: without a bound of its own the inbox would hold whatever gateways send."""
    one = submitted_bytes(long("a"))
    driven = DrivenEngine(max_model_len=512, num_blocks=256, max_num_batched_tokens=512, max_waiting_bytes=2 * one)
    driven.submit(*(long(f"r{i}", max_tokens=2) for i in range(5)))
    assert driven.engine.snapshot().num_waiting == 2, "what was refused does not wait"
    driven.run()
    assert sorted(driven.errors) == ["r2", "r3", "r4"]
    assert all(isinstance(error, Overloaded) for error in driven.errors.values())
    assert {driven.finish[f"r{i}", 0] for i in range(2)} == {FinishReason.LENGTH}


def test_a_request_that_is_too_large_by_itself_is_told_so_and_not_to_come_back() -> None:
    driven = DrivenEngine(max_model_len=512, num_blocks=256, max_waiting_bytes=4_000)
    driven.submit(long("big"))
    driven.run()
    assert isinstance(driven.errors["big"], RequestTooLarge)


def test_the_counted_bytes_are_about_those_that_requests_take() -> None:
    """Requests as they come from the wire, with ids that no small-integer cache holds."""
    for changes in ({}, {"n": 4}, {"logit_bias": {1000 + i: 0.5 for i in range(300)}}, {"grammar": SCHEMA}):
        driven = DrivenEngine(max_model_len=2048, num_blocks=2048, block_size=16, max_waiting=10_000)
        asked = [request(f"r{i}", list(range(300 + i, 1300 + i)), **changes) for i in range(30)]
        sent = [encode_submit(each, Handle(i + 1)).submit.SerializeToString() for i, each in enumerate(asked)]
        message = type(encode_submit(asked[0], Handle(1)).submit)
        tracemalloc.start()
        before = tracemalloc.get_traced_memory()[0]
        for data in sent:
            driven.scheduler.sequences.add(decode_submit(message.FromString(data), 0.0), 0.0)
        taken = tracemalloc.get_traced_memory()[0] - before
        tracemalloc.stop()
        counted = sum(driven.scheduler.sequences.waiting.num_bytes)
        assert counted == sum(submitted_bytes(each) for each in asked)
        assert 0.8 < counted / taken < 1.5, (changes, counted, taken)


def full_queue(*waiting: EngineRequest, **options: object) -> DrivenEngine:
    """An engine whose only slot is taken, and whose queue holds `waiting` and no more."""
    driven = DrivenEngine(max_num_seqs=1, max_waiting=sum(each.params.n for each in waiting), **options)  # type: ignore[arg-type]
    driven.submit(request("runs", [1, 2], max_tokens=20, tenant="flood"))
    driven.turn()
    driven.submit(*waiting)
    driven.turn()
    assert not driven.errors
    return driven


def flood(count: int, **changes: object) -> list[EngineRequest]:
    return [request(f"f{i}", [1, i], tenant="flood", max_tokens=2, **changes) for i in range(count)]


def refused(driven: DrivenEngine, *newcomers: EngineRequest) -> list[str]:
    """The names of all requests that are refused once `newcomers` were handed in, one after another."""
    for each in newcomers:
        driven.submit(each)
        driven.turn()
        driven.scheduler.check()
    driven.run()
    for error in driven.errors.values():
        assert isinstance(error, Overloaded)
        assert error.retry_after_s > 0
    names = {str(name) for name, _ in driven.finish}
    assert not names & set(driven.errors), "a request is served or refused"
    return sorted(map(str, driven.errors))


def test_a_tenant_that_fills_the_queue_gives_way_up_to_equal_parts_its_newest_first() -> None:
    driven = full_queue(*flood(6))
    others = [request(f"o{i}", [2, i], tenant="other", max_tokens=2) for i in range(4)]
    assert refused(driven, *others) == ["f3", "f4", "f5", "o3"]


def test_its_own_requests_beyond_the_queue_are_refused() -> None:
    driven = full_queue(*flood(3))
    assert refused(driven, request("f3", [1, 3], tenant="flood")) == ["f3"]


def test_no_class_gives_way_to_another() -> None:
    driven = full_queue(*flood(4))
    premium = request("p", [4], priority=PriorityClass.PREMIUM, tenant="new", max_tokens=2)
    batch = request("b", [3, 2], priority=PriorityClass.BATCH, tenant="new", max_tokens=2)
    assert refused(driven, premium, batch) == ["b"], "batch requests count behind the others; a premium one has a queue of its own"


def test_parts_are_by_weight() -> None:
    driven = full_queue(*flood(6, tier=TierTerms(name="wide", weight=2.0)))
    others = [request(f"o{i}", [2, i], tenant="other", max_tokens=2) for i in range(4)]
    assert refused(driven, *others) == ["f4", "f5", "o2", "o3"]


def test_a_request_leaves_whole_and_as_many_leave_as_are_needed() -> None:
    driven = full_queue(*flood(2), *(request(f"n{i}", [5, i], tenant="flood", n=3, max_tokens=2) for i in range(2)))
    assert refused(driven, request("o", [2, 2], tenant="other", n=2, max_tokens=2)) == ["n1"]
    driven = full_queue(*flood(6))
    assert refused(driven, request("o", [2, 2], tenant="other", n=2, max_tokens=2)) == ["f4", "f5"]


def test_what_was_computed_before_never_leaves() -> None:
    resumed = [request(f"r{i}", [1, i], tenant="flood", output_ids=(7,), max_tokens=4) for i in range(2)]
    driven = full_queue(*resumed)
    assert refused(driven, request("o", [2, 2], tenant="other", max_tokens=2)) == ["o"]
    driven = full_queue(*flood(2))
    driven.scheduler.sequences.preempt(driven.scheduler.sequences.slots.running[0], driven.clock.now)
    assert "runs" not in refused(driven, *(request(f"o{i}", [2, i], tenant="other", max_tokens=2) for i in range(2)))


@pytest.mark.parametrize("policy", ["fcfs", "sjf"])
def test_a_policy_that_knows_no_tenants_refuses_the_newcomer(policy: str) -> None:
    driven = full_queue(*flood(4), queue_policy=policy)
    assert refused(driven, request("o", [2, 2], tenant="other", max_tokens=2)) == ["o"]


def test_the_place_of_a_request_and_its_bytes_are_found_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """Bytes once where the request is submitted, and once where the scheduler adds it."""
    calls: Counter[str] = Counter()

    def counted(module: ModuleType, name: str) -> None:
        function = getattr(module, name)

        def call(*given: object) -> object:
            calls[f"{module.__name__.rpartition('.')[2]}.{name}"] += 1
            return function(*given)

        monkeypatch.setattr(module, name, call)

    counted(sequence_table, "displaced")
    counted(core_request, "request_bytes")
    counted(inbox, "submitted_bytes")
    counted(sequence_table, "submitted_bytes")
    driven = full_queue(*flood(4))
    calls.clear()
    assert refused(driven, request("o", [2, 2], tenant="other", max_tokens=2)) == ["f3"]
    assert calls == {
        "sequence_table.displaced": 1,
        "inbox.submitted_bytes": 1,
        "sequence_table.submitted_bytes": 1,
        "request.request_bytes": 2,
    }


def test_bytes_are_parts_too() -> None:
    one = submitted_bytes(long("a", tenant="flood"))
    driven = DrivenEngine(max_num_seqs=1, max_model_len=512, num_blocks=256, max_waiting_bytes=4 * one, max_num_batched_tokens=512)
    driven.submit(request("runs", [1, 2], max_tokens=20, tenant="flood"))
    driven.turn()
    driven.submit(*(long(f"f{i}", tenant="flood", max_tokens=2) for i in range(4)))
    driven.turn()
    assert refused(driven, long("o", tenant="other", max_tokens=2)) == ["f3"]
