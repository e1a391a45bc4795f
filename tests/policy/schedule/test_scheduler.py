"""Tests the scheduler against a runner with real paged memory: what is produced must be what the plain loop produces."""

from __future__ import annotations

from itertools import pairwise
from typing import Any

import pytest
from engine_kit import FULL, VOCAB, WINDOW, DrivenEngine, request
from kv_oracle import expected_tokens

from headrace.core.errors import InvalidRequest, Overloaded, RequestTooLarge, Unavailable
from headrace.core.grammar import Grammar, GrammarKind
from headrace.core.ids import RequestId
from headrace.core.model_info import KvGroup
from headrace.core.plan import Plan
from headrace.core.plan_codec import load_plans
from headrace.core.request import PriorityClass, TierTerms
from headrace.core.update import FinishReason
from headrace.policy.queues import fair
from headrace.policy.queues.keyed import FcfsQueue
from headrace.policy.queues.queue import StepShares
from headrace.policy.step_builder import MAX_PROMPT_LOGPROB_TOKENS

pytestmark = pytest.mark.pure

PROMPTS = [[(7 * i + j * j) % VOCAB for j in range(2 + 3 * (i % 6))] for i in range(12)]
GROUPS = {"full": (FULL,), "full+window": (FULL, WINDOW), "window": (WINDOW,)}


def assert_plain(driven: DrivenEngine, count: int = 10, n: int = 1) -> None:
    for i, prompt in enumerate(PROMPTS):
        for index in range(n):
            assert driven.tokens[f"r{i}", index] == expected_tokens(prompt, count, VOCAB, index), (i, index, driven.errors)


@pytest.mark.parametrize("depth", [1, 2])
@pytest.mark.parametrize("caching", [True, False])
@pytest.mark.parametrize("groups", GROUPS, ids=str)
@pytest.mark.parametrize("budget", [8, 9, 64])
def test_batched_chunked_and_preempted_sequences_equal_the_plain_loop(depth: int, caching: bool, groups: str, budget: int) -> None:
    driven = DrivenEngine(depth=depth, caching=caching, groups=GROUPS[groups], num_blocks=20, max_num_batched_tokens=budget)
    driven.submit(*(request(f"r{i}", prompt, max_tokens=10) for i, prompt in enumerate(PROMPTS)))
    assert_plain(driven.run())


def chunks_of_a_long_prompt(costly_context: int, *, num_streams: int) -> list[int]:
    """Tokens of a prompt of 400 in each step that computes some, while others decode."""
    driven = DrivenEngine(num_blocks=400, max_model_len=600, max_num_batched_tokens=40, costly_context=costly_context)
    driven.submit(*(request(f"s{i}", PROMPTS[i], max_tokens=200) for i in range(num_streams)))
    driven.turn(3)
    driven.submit(request("long", [(3 * i) % VOCAB for i in range(400)], max_tokens=1))
    counts: list[int] = []
    while ("long", 0) not in driven.finish:
        driven.turn()
        plan = driven.engine._steps.recent[-1]
        counts += [count for count in plan.counts if count > 1]
        assert plan.num_tokens <= 40
        assert list(plan.counts).count(1) >= num_streams  # the prompt's last chunk may be one token, too
        driven.scheduler.check()
    assert driven.tokens["long", 0] == expected_tokens([(3 * i) % VOCAB for i in range(400)], 1, VOCAB)
    return counts


def test_chunks_get_shorter_far_into_a_prompt_while_others_decode() -> None:
    """What a chunk costs, a token at position p counting 1 + p / costly_context, stays what the budget allows."""
    counts = chunks_of_a_long_prompt(100, num_streams=3)
    starts = [sum(counts[:i]) for i in range(len(counts))]
    costs = [count * (1 + start / 100) for count, start in zip(counts, starts, strict=True)]
    assert counts[0] == 37
    assert all(later <= earlier for earlier, later in pairwise(counts))
    assert all(37 - 5 <= cost <= 37 for cost in costs[:-1])
    assert costs[-1] <= 37


def test_chunks_are_as_long_as_the_budget_where_context_is_cheap_or_nobody_waits() -> None:
    assert set(chunks_of_a_long_prompt(0, num_streams=3)[:-1]) == {37}
    assert set(chunks_of_a_long_prompt(100, num_streams=0)[:-1]) == {40}


LONG = [(3 * i) % VOCAB for i in range(400)]


def steps_to_first_token(driven: DrivenEngine, name: str, limit: int = 200) -> list[Plan]:
    """The plans made until `name` has its first token."""
    plans: list[Plan] = []
    while not driven.tokens[name, 0]:
        assert len(plans) < limit
        driven.turn()
        plans.append(driven.engine._steps.recent[-1])
        driven.scheduler.check()
    return plans


@pytest.mark.parametrize("policy", ["fcfs", "priority", "sjf", "fair"])
@pytest.mark.parametrize("num_streams", [0, 3])
@pytest.mark.parametrize("costly_context", [0, 100])
def test_a_short_prompt_does_not_wait_for_the_end_of_a_long_one(costly_context: int, num_streams: int, policy: str) -> None:
    driven = DrivenEngine(num_blocks=400, max_model_len=600, max_num_batched_tokens=40, costly_context=costly_context, queue_policy=policy)
    driven.submit(*(request(f"s{i}", PROMPTS[i], max_tokens=200) for i in range(num_streams)))
    driven.turn(3)
    driven.submit(request("long", LONG, max_tokens=4))
    driven.turn(3)
    driven.submit(request("short", PROMPTS[5], max_tokens=4), request("next", PROMPTS[4], max_tokens=4))
    plans = steps_to_first_token(driven, "short")
    assert len(plans) <= 2 + len(PROMPTS[5]) // (40 // 4 - num_streams)
    assert not driven.tokens["long", 0]
    assert len(steps_to_first_token(driven, "next")) <= 3
    assert not driven.tokens["long", 0]
    driven.run()
    assert driven.tokens["long", 0] == expected_tokens(LONG, 4, VOCAB)
    assert driven.tokens["short", 0] == expected_tokens(PROMPTS[5], 4, VOCAB)


def test_a_long_prompt_keeps_three_quarters_of_each_step_however_many_come_behind_it() -> None:
    driven = DrivenEngine(num_blocks=800, max_model_len=600, max_num_batched_tokens=40, max_num_seqs=40)
    driven.submit(request("long", LONG, max_tokens=1))
    driven.turn(2)
    driven.submit(*(request(f"r{i}", [(5 * i + j) % VOCAB for j in range(17)], max_tokens=1) for i in range(30)))
    chunks = [max(plan.counts) for plan in steps_to_first_token(driven, "long")]
    assert chunks[:8] == [30] * 8
    assert len(driven.finish) > 1
    driven.run()


def test_short_prompts_leave_a_long_one_the_last_blocks_for_its_chunk() -> None:
    """A group with a window takes a prompt's blocks chunk by chunk: starting the short prompts would preempt the long one at once."""
    driven = DrivenEngine(groups=(WINDOW,), num_blocks=14, max_model_len=600, max_num_batched_tokens=40, caching=False)
    driven.submit(request("long", LONG, max_tokens=1))
    driven.turn(2)
    driven.submit(*(request(f"short{i}", [5 * i, 7, 9], max_tokens=4) for i in range(6)))
    plans = steps_to_first_token(driven, "long")
    assert [list(plan.counts) for plan in plans] == [[40]] * len(plans)
    assert driven.scheduler.sequences.counters.preemptions == 0
    driven.run()
    assert driven.tokens["long", 0] == expected_tokens(LONG, 1, VOCAB)
    assert driven.tokens["short5", 0] == expected_tokens([25, 7, 9], 4, VOCAB)


def chunks_beside_newcomers(driven: DrivenEngine, newcomer: list[int], count: int) -> list[int]:
    """Tokens of a long prompt in each of its steps, while `count` one-token requests are queued behind it. The largest chunk is its own."""
    driven.submit(request("long", LONG, max_tokens=1))
    driven.turn(2)
    driven.submit(*(request(f"new{i}", [*newcomer, i], max_tokens=1) for i in range(count)))
    plans = steps_to_first_token(driven, "long")
    assert driven.tokens["new0", 0], "the sequence queued behind it had its answer first"
    driven.run()
    assert driven.tokens["long", 0] == expected_tokens(LONG, 1, VOCAB)
    return [max(plan.counts) for plan in plans[:-1]]


def test_newcomers_far_into_a_cached_prompt_pay_its_price_and_leave_a_long_one_its_part() -> None:
    driven = DrivenEngine(num_blocks=2000, max_model_len=600, max_num_batched_tokens=40, max_num_seqs=40, costly_context=20)
    cached = LONG[::-1]
    driven.submit(request("before", cached, max_tokens=1))
    driven.run()
    chunks = chunks_beside_newcomers(driven, [*cached, 7], 30)
    starts = [80 + sum(chunks[:i]) for i in range(len(chunks))]
    assert all((chunk + 1) * (1 + start / 20) > 40 / 2 for chunk, start in zip(chunks, starts, strict=True))


@pytest.mark.parametrize("num_streams", [1, 2, 3, 4])
def test_a_sequence_queued_behind_a_long_prompt_has_a_token_of_a_small_budget(num_streams: int) -> None:
    driven = DrivenEngine(num_blocks=400, max_model_len=600, max_num_batched_tokens=6)
    driven.submit(*(request(f"s{i}", PROMPTS[i], max_tokens=500) for i in range(num_streams)))
    driven.turn(20)
    chunks = chunks_beside_newcomers(driven, [5], 1)
    assert min(chunks) >= 6 - num_streams - 1


@pytest.mark.parametrize("hindrance", [{"max_num_seqs": 1}, {"num_blocks": 108}])
def test_a_long_prompt_has_all_of_a_step_where_no_other_sequence_can_use_it(hindrance: dict[str, Any]) -> None:
    """No slot is free, or too few blocks: what is reserved for sequences queued behind it is not left unused."""
    driven = DrivenEngine(max_model_len=420, max_num_batched_tokens=40, **{"num_blocks": 400, **hindrance})
    driven.submit(request("long", LONG, max_tokens=8))
    driven.turn(2)
    driven.submit(request("other", LONG[::-1], max_tokens=1))
    chunks = [max(plan.counts) for plan in steps_to_first_token(driven, "long")]
    assert chunks == [40] * 8
    driven.run()
    assert driven.tokens["long", 0] == expected_tokens(LONG, 8, VOCAB)


@pytest.mark.parametrize("depth", [1, 2])
@pytest.mark.parametrize("costly_context", [0, 100])
def test_the_row_that_breaks_a_step_is_found_beside_a_long_prompt(costly_context: int, depth: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Repeated in halves, the long prompt alone takes all of a step's budget: the rows after it are still repeated."""
    driven = DrivenEngine(
        num_blocks=600, max_model_len=900, max_num_seqs=8, max_num_batched_tokens=40, costly_context=costly_context, depth=depth
    )
    driven.runner.fail_when = [96]
    long = [i % 90 for i in range(700)]
    recoveries: list[int] = []
    recover = driven.engine._recovery.recover

    def counted(plans: list[Plan]) -> None:
        recoveries.append(len(plans))
        recover(plans)

    monkeypatch.setattr(driven.engine._recovery, "recover", counted)
    driven.submit(*(request(f"s{i}", [i + 1], max_tokens=60) for i in range(2)))
    driven.turn(2)
    driven.submit(request("long", long, max_tokens=2), request("bad", [96] + [5] * 30, max_tokens=2))
    while "bad" not in driven.errors:
        driven.turn()
    assert len(recoveries) == 1
    assert ("long", 0) not in driven.finish
    driven.run()
    assert "bad" in driven.errors
    assert driven.tokens["long", 0] == expected_tokens(long, 2, VOCAB)
    assert all(driven.tokens[f"s{i}", 0] == expected_tokens([i + 1], 60, VOCAB) for i in range(2))


@pytest.mark.parametrize("policy", ["fcfs", "priority", "sjf", "fair"])
@pytest.mark.parametrize("depth", [1, 2])
def test_every_queue_policy_gives_the_same_tokens(policy: str, depth: int) -> None:
    driven = DrivenEngine(queue_policy=policy, depth=depth, num_blocks=18)
    for i, prompt in enumerate(PROMPTS):
        driven.submit(request(f"r{i}", prompt, max_tokens=10, tenant=f"t{i % 3}", priority=PriorityClass(i % 3)))
    assert_plain(driven.run())


@pytest.mark.parametrize("depth", [1, 2])
@pytest.mark.parametrize("groups", GROUPS, ids=str)
@pytest.mark.parametrize("caching", [True, False])
def test_forked_sequences_equal_separate_ones(depth: int, groups: str, caching: bool) -> None:
    driven = DrivenEngine(depth=depth, groups=GROUPS[groups], caching=caching, num_blocks=22)
    driven.submit(*(request(f"r{i}", prompt, max_tokens=10, n=3) for i, prompt in enumerate(PROMPTS)))
    assert_plain(driven.run(), n=3)


def test_forked_sequences_share_the_blocks_of_their_prompt() -> None:
    driven = DrivenEngine(num_blocks=64, max_num_batched_tokens=64, caching=False)
    driven.submit(request("r", list(range(17)), n=4, max_tokens=2))
    driven.turn(2)
    # 17 prompt tokens are 5 blocks of 4; without sharing four sequences would hold 20. Each writer copies the last block once.
    assert driven.engine.snapshot().kv_blocks_used - 1 <= 4 + 4
    driven.run()
    assert all(driven.tokens["r", k] == expected_tokens(list(range(17)), 2, VOCAB, k) for k in range(4))


def test_a_prefix_hit_skips_the_shared_blocks_only_and_counts_them() -> None:
    driven = DrivenEngine()
    first, second = list(range(13)), [*range(12), 50, 51]
    driven.submit(request("a", first))
    driven.run()
    driven.submit(request("b", second))
    driven.run()
    assert driven.tokens["b", 0] == expected_tokens(second, 8, VOCAB)
    cached = [u.num_cached_tokens for u in driven.updates if u.request_id == "b" and u.num_cached_tokens is not None]
    assert cached == [12]
    assert driven.scheduler.sequences.counters.prefix_cache_hit_tokens == 12


def test_tenants_with_different_salts_do_not_share_blocks() -> None:
    driven = DrivenEngine()
    for name, salt in (("a", b"one"), ("b", b"two"), ("c", b"one")):
        driven.submit(request(name, list(range(13)), salt=salt))
        driven.run()
    cached = {str(u.request_id): u.num_cached_tokens for u in driven.updates if u.num_cached_tokens is not None}
    assert cached == {"a": 0, "b": 0, "c": 12}


def test_a_request_that_opts_out_neither_reads_nor_feeds_the_cache() -> None:
    driven = DrivenEngine()
    for name, caching in (("a", False), ("b", True), ("c", False)):
        driven.submit(request(name, list(range(13)), prefix_caching=caching))
        driven.run()
    cached = {str(u.request_id): u.num_cached_tokens for u in driven.updates if u.num_cached_tokens is not None}
    assert cached == {"a": 0, "b": 0, "c": 0}


def test_prompt_logprobs_ignore_prefix_hits() -> None:
    driven = DrivenEngine()
    for name in ("a", "b"):
        driven.submit(request(name, list(range(13)), prompt_logprobs=1 if name == "b" else None))
        driven.run()
    assert [u.num_cached_tokens for u in driven.updates if u.num_cached_tokens is not None] == [0, 0]


def test_a_window_gives_its_blocks_back_while_running() -> None:
    driven = DrivenEngine(groups=(WINDOW,), num_blocks=12, max_model_len=60, max_num_batched_tokens=8, caching=False)
    driven.submit(request("r", [3, 4], max_tokens=50))
    most = 0
    while driven.engine.turn():
        most = max(most, driven.engine.snapshot().kv_blocks_used - 1)
    assert driven.tokens["r", 0] == expected_tokens([3, 4], 50, VOCAB)
    assert most <= 3, "52 tokens with a window of 6 fit 3 blocks of 4"


def test_end_tokens_end_a_sequence_only_after_min_tokens() -> None:
    stop = expected_tokens([1, 2, 3], 8, VOCAB)[2]
    driven = DrivenEngine(eos=(stop,))
    driven.submit(request("a", [1, 2, 3], ignore_eos=False), request("b", [1, 2, 3], ignore_eos=False, min_tokens=4))
    driven.submit(request("c", [1, 2, 3], stop_token_ids=(stop,)), request("d", [1, 2, 3]))
    driven.run()
    assert [len(driven.tokens[name, 0]) for name in "abcd"] == [3, 8, 3, 8]
    assert driven.finish["a", 0] is driven.finish["c", 0] is FinishReason.STOP
    assert driven.finish["d", 0] is FinishReason.LENGTH


@pytest.mark.parametrize("depth", [1, 2])
def test_cancelling_at_every_moment_frees_everything_and_harms_nobody(depth: int) -> None:
    for moment in range(12):
        driven = DrivenEngine(depth=depth, num_blocks=20)
        driven.submit(*(request(f"r{i}", prompt, max_tokens=10) for i, prompt in enumerate(PROMPTS)))
        driven.turn(moment)
        driven.engine.cancel(RequestId("r3"))
        driven.run()
        for i, prompt in enumerate(PROMPTS):
            expected = expected_tokens(prompt, 10, VOCAB)
            assert driven.tokens[f"r{i}", 0] == expected[: len(driven.tokens[f"r{i}", 0])]
            assert i == 3 or len(driven.tokens[f"r{i}", 0]) == 10
        assert driven.finish["r3", 0] in (FinishReason.CANCELLED, FinishReason.LENGTH)


def test_a_stop_found_upstairs_ends_the_sequence_and_its_overrun_is_not_cached() -> None:
    driven = DrivenEngine(num_blocks=64)
    prompt = [5, 6, 7]
    driven.submit(request("r", prompt, max_tokens=30, stop=("x",)))
    driven.turn(12)
    driven.engine.finish(RequestId("r"), 0, 2)
    driven.run()
    assert driven.finish["r", 0] is FinishReason.STOP
    assert driven.scheduler.sequences.counters.generation_tokens == 2
    assert driven.kv.pools[0].num_cached == 1, "5 kept tokens are one full block of 4; later blocks are not left behind"


def test_deadlines_end_waiting_and_running_sequences() -> None:
    driven = DrivenEngine(max_num_seqs=1)
    deadline_at = driven.clock.now + 5
    driven.submit(request("a", [1], max_tokens=50, deadline_at=deadline_at), request("b", [2], max_tokens=50, deadline_at=deadline_at))
    driven.turn(3)
    driven.clock.now += 6
    driven.run()
    assert driven.finish["a", 0] is driven.finish["b", 0] is FinishReason.DEADLINE
    assert 0 < len(driven.tokens["a", 0]) < 50
    assert driven.tokens["b", 0] == []


def test_a_sequence_takes_no_budget_before_its_prerequisites_are_met() -> None:
    driven = DrivenEngine()
    driven.submit(request("a", [1, 2]), needs=frozenset({"grammar", "adapter"}))
    driven.submit(request("b", [3]))
    driven.turn(12)
    assert driven.finish == {("b", 0): FinishReason.LENGTH}
    assert driven.scheduler.sequences.num_waiting == 1
    driven.satisfied("a", "grammar")
    driven.turn(2)
    assert ("a", 0) not in driven.tokens
    driven.satisfied("a", "adapter")
    driven.run()
    assert driven.tokens["a", 0] == expected_tokens([1, 2], 8, VOCAB)


def test_a_prerequisite_that_never_comes_has_its_request_refused_alone() -> None:
    driven = DrivenEngine(prerequisite_timeout_s=3.0)
    driven.submit(request("a", [1, 2]), needs=frozenset({"kv"}))
    driven.submit(request("b", [3]))
    driven.turn(2)
    driven.clock.now += 4
    driven.run()
    assert isinstance(driven.errors["a"], Unavailable)
    assert "kv" in str(driven.errors["a"])
    assert ("a", 0) not in driven.finish
    assert driven.finish["b", 0] is FinishReason.LENGTH


def test_the_waiting_queue_is_bounded() -> None:
    driven = DrivenEngine(max_waiting=3, max_num_seqs=1)
    driven.submit(*(request(f"r{i}", [i + 1]) for i in range(5)))
    driven.run()
    assert [type(driven.errors.get(f"r{i}")) for i in range(5)] == [type(None)] * 3 + [Overloaded] * 2


def test_a_request_that_can_never_fit_is_refused_with_the_arithmetic() -> None:
    driven = DrivenEngine(num_blocks=5, max_model_len=64)
    driven.submit(request("r", list(range(12)), max_tokens=20))
    driven.run()
    assert isinstance(driven.errors["r"], RequestTooLarge)
    assert "8 KV blocks of 4, the pool has 4" in str(driven.errors["r"])


@pytest.mark.parametrize(
    ("bad", "field"), [({"prompt": [VOCAB]}, "prompt"), ({"prompt": []}, "prompt"), ({"max_tokens": 64}, "max_tokens")]
)
def test_what_the_engine_cannot_take_is_refused_by_name(bad: dict[str, object], field: str) -> None:
    driven = DrivenEngine()
    driven.submit(request("r", **{"prompt": [1], **bad}), request("ok", [1]))  # type: ignore[arg-type]
    driven.run()
    error = driven.errors["r"]
    assert isinstance(error, InvalidRequest)
    assert error.field == field
    assert driven.finish["ok", 0] is FinishReason.LENGTH


def test_static_batching_starts_a_batch_only_when_the_last_one_has_ended() -> None:
    driven = DrivenEngine(static_batching=True, max_num_seqs=4, max_num_batched_tokens=8)
    driven.submit(*(request(f"r{i}", prompt, max_tokens=4 + 6 * (i % 2)) for i, prompt in enumerate(PROMPTS[:8])))
    batches: list[set[str]] = []
    while driven.engine.turn():
        running = {str(seq.request.request_id) for seq in driven.scheduler.sequences.slots.running}
        if running and not any(running <= batch for batch in batches):
            batches.append(running)
    assert batches == [{"r0", "r1", "r2", "r3"}, {"r4", "r5", "r6", "r7"}]
    assert driven.tokens["r7", 0] == expected_tokens(PROMPTS[7], 10, VOCAB)


def test_without_chunking_a_prompt_is_computed_in_one_step() -> None:
    driven = DrivenEngine(enable_chunked_prefill=False, max_num_batched_tokens=16, num_blocks=64)
    driven.submit(*(request(f"r{i}", prompt, max_tokens=10) for i, prompt in enumerate(PROMPTS)), request("long", list(range(40))))
    counts: list[int] = []
    submit = driven.runner.submit

    def spy(plan):  # type: ignore[no-untyped-def]
        counts.extend(plan.counts)
        return submit(plan)

    driven.runner.submit = spy  # type: ignore[method-assign]
    assert_plain(driven.run())
    assert sorted(count for count in counts if count > 1) == sorted([*(len(prompt) for prompt in PROMPTS), 40])


def test_prompts_with_logprobs_share_a_small_part_of_each_step() -> None:
    """Each log-probability of a prompt costs a row of logits over the vocabulary: a step full of them would hold everybody up."""
    driven = DrivenEngine(max_num_batched_tokens=512, num_blocks=256, max_model_len=512)
    prompts = {name: [(7 * number + i) % VOCAB for i in range(150)] for number, name in enumerate(("a", "b", "plain"))}
    driven.submit(*(request(name, ids, max_tokens=6, prompt_logprobs=None if name == "plain" else 0) for name, ids in prompts.items()))
    steps: list[list[int]] = []
    submit = driven.runner.submit

    def spy(plan):  # type: ignore[no-untyped-def]
        steps.append(list(plan.counts))
        return submit(plan)

    driven.runner.submit = spy  # type: ignore[method-assign]
    driven.run()
    assert steps[0] == [MAX_PROMPT_LOGPROB_TOKENS, 1, 150], "the second one starts, and a prompt without log-probabilities is not held back"
    assert max(count for counts in steps[1:] for count in counts) == MAX_PROMPT_LOGPROB_TOKENS
    for name, ids in prompts.items():
        assert driven.tokens[name, 0] == expected_tokens(ids, 6, VOCAB)
        told = sum(len(update.prompt_logprobs) for update in driven.updates if update.request_id == name)
        assert told == (0 if name == "plain" else 149)


def test_priority_serves_premium_first_and_aging_prevents_starvation() -> None:
    driven = DrivenEngine(queue_policy="priority", max_num_seqs=1)
    driven.submit(request("running", [1]))
    driven.turn()
    driven.submit(request("batch", [2], priority=PriorityClass.BATCH), request("premium", [3], priority=PriorityClass.PREMIUM))
    driven.run()
    assert list(driven.finish) == [("premium", 0), ("running", 0), ("batch", 0)], "the only slot is made free for a premium request"
    late = DrivenEngine(queue_policy="priority", max_num_seqs=1)
    late.submit(request("running", [1]), request("batch", [2], priority=PriorityClass.BATCH))
    late.turn()
    late.clock.now += 30
    late.submit(request("premium", [3], priority=PriorityClass.PREMIUM))
    late.run()
    assert list(late.finish) == [("running", 0), ("batch", 0), ("premium", 0)]


def test_a_class_counts_unless_the_operator_says_otherwise() -> None:
    driven = DrivenEngine(max_num_seqs=1)
    driven.submit(request("running", [1]))
    driven.turn()
    driven.submit(request("batch", [2], priority=PriorityClass.BATCH), request("standard", [3]))
    driven.run()
    assert list(driven.finish) == [("running", 0), ("standard", 0), ("batch", 0)]


def test_sjf_serves_short_jobs_first_and_aging_prevents_starvation() -> None:
    driven = DrivenEngine(queue_policy="sjf", max_num_seqs=1)
    driven.submit(request("running", [1]))
    driven.turn()
    driven.submit(request("long", [2], max_tokens=40), request("short", [3], max_tokens=2))
    driven.run()
    assert list(driven.finish) == [("running", 0), ("short", 0), ("long", 0)]
    late = DrivenEngine(queue_policy="sjf", max_num_seqs=1)
    late.submit(request("running", [1]), request("long", [2], max_tokens=40))
    late.turn()
    late.clock.now += 1.0
    late.submit(request("short", [3], max_tokens=2))
    late.run()
    assert list(late.finish) == [("running", 0), ("long", 0), ("short", 0)]


def test_fair_queueing_gives_a_quiet_tenant_its_turn() -> None:
    driven = DrivenEngine(queue_policy="fair", max_num_seqs=1)
    driven.submit(*(request(f"noisy{i}", [i + 1], tenant="noisy") for i in range(6)))
    driven.turn(2)
    driven.submit(request("quiet", [9], tenant="quiet"))
    driven.run()
    assert list(driven.finish).index(("quiet", 0)) == 1


@pytest.mark.parametrize(("credit", "idle_turns"), [(0.0, 2), (1000.0, 4)])
def test_idling_earns_its_credit_and_no_more(credit: float, idle_turns: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Nothing waited while the other tenant was served: its counter alone says what the idle one has missed."""
    monkeypatch.setattr(fair, "IDLE_CREDIT_TOKENS", credit)
    driven = DrivenEngine(queue_policy="fair", max_num_seqs=1)
    for name in ("idle", *("busy" for _ in range(6))):
        driven.submit(request(f"{name}{len(driven.finish)}", [5, 6], tenant=name))
        driven.run()
    done = len(driven.finish)
    for i in range(4):
        driven.submit(request(f"idle-{i}", [i + 1], tenant="idle"), request(f"busy-{i}", [i + 1], tenant="busy"))
    driven.run()
    served_first = [name.partition("-")[0] for name, _ in list(driven.finish)[done : done + 4]]
    assert served_first.count("idle") == idle_turns


def test_weights_share_service_in_proportion() -> None:
    driven = DrivenEngine(queue_policy="fair", max_num_seqs=1)
    for i in range(12):
        driven.submit(request(f"heavy{i}", [i + 1], tier=TierTerms(name="heavy", weight=3.0)), request(f"light{i}", [i + 1]))
    driven.run()
    first = [name for (name, _) in list(driven.finish)[:8]]
    assert sum(name.startswith("heavy") for name in first) == 6


def test_a_resumed_request_continues_where_it_stopped() -> None:
    expected = expected_tokens([4, 5, 6], 8, VOCAB)
    driven = DrivenEngine()
    driven.submit(request("r", [4, 5, 6], output_ids=tuple(expected[:3])))
    driven.run()
    assert driven.tokens["r", 0] == expected[3:]


def test_rows_of_sequences_with_a_grammar_name_their_slot_as_mask_slot() -> None:
    """In every plan: a chunk of the prompt, a row in bulk, a row after a preemption, each of n sequences."""
    digits = Grammar(GrammarKind.REGEX, "[0-9]+")
    driven = DrivenEngine(num_blocks=12, max_num_batched_tokens=5)
    given: dict[str, Any] = {"max_tokens": 20, "ignore_eos": False, "n": 2}
    requests = [request(f"{i}", [1, 2, 3, 4, 5, 6, i], grammar=digits if i % 2 else None, **given) for i in range(4)]
    driven.submit(*requests)
    driven.run()
    plans = list(driven.engine._steps.recent)
    has_grammar: dict[int, bool] = {}
    for plan in plans:
        has_grammar |= {started.slot: started.grammar == digits for started in plan.started}
        assert plan.mask_slots.tolist() == [slot if has_grammar[slot] else -1 for slot in plan.slots]
    assert len({plan.mask_slots[0] >= 0 for plan in plans if plan.num_rows}) == 2, "rows of both kinds were planned"
    assert driven.scheduler.sequences.counters.preemptions, "and some were planned again"


def test_blocks_are_not_smaller_than_one_token_and_may_hold_a_whole_sequence() -> None:
    for block_size, num_blocks in ((1, 200), (64, 6)):
        driven = DrivenEngine(block_size=block_size, num_blocks=num_blocks)
        driven.submit(*(request(f"r{i}", prompt, max_tokens=10) for i, prompt in enumerate(PROMPTS)))
        assert_plain(driven.run())


def test_a_preallocated_pool_runs_as_many_sequences_as_it_has_blocks() -> None:
    driven = DrivenEngine(block_size=64, num_blocks=5, caching=False)
    driven.submit(*(request(f"r{i}", prompt, max_tokens=10) for i, prompt in enumerate(PROMPTS)))
    driven.turn(4)
    assert len(driven.scheduler.sequences.slots) == 4


def test_odd_groups_are_possible() -> None:
    groups = (KvGroup((0,), 1, 8, 4, window=5), KvGroup((1,), 2, 8, 4, window=9), FULL)
    driven = DrivenEngine(groups=groups, num_blocks=24)
    driven.submit(*(request(f"r{i}", prompt, max_tokens=10) for i, prompt in enumerate(PROMPTS)))
    driven.submit(*(request(f"s{i}", prompt, max_tokens=10) for i, prompt in enumerate(PROMPTS)))
    assert_plain(driven.run())


def test_a_row_planned_before_a_preemption_does_not_count_afterwards() -> None:
    driven = DrivenEngine(depth=2, caching=False)
    scheduler, runner = driven.scheduler, driven.runner
    scheduler.sequences.add(request("r", list(range(40)), max_tokens=4), now=0.0)
    before = scheduler.plan(now=0.0)
    scheduler.sequences.preempt(scheduler.sequences.slots.running[0], 0.0)
    after = scheduler.plan(now=0.0)
    assert before is not None
    assert after is not None
    scheduler.commit(before, runner.compute(before), 0.0)
    scheduler.check()
    assert scheduler.sequences.slots.running[0].num_computed == 0
    scheduler.commit(after, runner.compute(after), 0.0)
    assert scheduler.sequences.slots.running[0].num_computed == 16
    driven.run()
    assert driven.tokens["r", 0] == expected_tokens(list(range(40)), 4, VOCAB)


@pytest.mark.parametrize("depth", [1, 2])
def test_a_preempted_prompt_is_computed_again_but_told_once(depth: int) -> None:
    prompts = [[(i + j) % 90 for j in range(18)] for i in range(4)]
    driven = DrivenEngine(depth=depth, num_blocks=16, max_num_batched_tokens=7)
    driven.submit(*(request(f"r{i}", prompt, prompt_logprobs=0, max_tokens=14) for i, prompt in enumerate(prompts)))
    driven.turn(9)
    driven.scheduler.sequences.preempt(driven.scheduler.sequences.slots.running[0], driven.clock.now)
    driven.run()
    for i, prompt in enumerate(prompts):
        told = [entry for update in driven.updates if update.request_id == f"r{i}" for entry in update.prompt_logprobs]
        assert [(entry.token_id, -entry.logprob) for entry in told] == [(prompt[p], p) for p in range(1, 18)]


def test_a_windowed_conversation_longer_than_the_pool_finds_its_prefix_again() -> None:
    driven = DrivenEngine(groups=(WINDOW,), num_blocks=9, max_model_len=90, max_num_batched_tokens=8)
    first = [(5 * i) % 90 for i in range(60)]
    driven.submit(request("first", first, max_tokens=2))
    driven.run()
    second = first + driven.tokens["first", 0] + [(7 * i) % 90 for i in range(9)]
    driven.submit(request("second", second, max_tokens=2), request("other", [1, 2, 3], max_tokens=2))
    driven.run()
    assert driven.tokens["second", 0] == expected_tokens(second, 2, VOCAB)
    assert driven.tokens["other", 0] == expected_tokens([1, 2, 3], 2, VOCAB)


def test_a_window_and_overlapped_steps_in_the_smallest_pool_make_progress() -> None:
    prompt = [(5 * i) % 90 for i in range(60)]
    # window 6 + two steps of 8 are 22 tokens: 6 blocks of 4, one more because a window begins anywhere, and the pad block
    driven = DrivenEngine(groups=(WINDOW,), num_blocks=8, max_model_len=90, max_num_batched_tokens=8, depth=2, caching=False)
    driven.submit(request("r", prompt, max_tokens=4))
    driven.run(max_turns=100)
    assert driven.tokens["r", 0] == expected_tokens(prompt, 4, VOCAB)
    assert driven.scheduler.sequences.counters.preemptions == 0
    smaller = DrivenEngine(groups=(WINDOW,), num_blocks=7, max_model_len=90, max_num_batched_tokens=8, depth=2)
    smaller.submit(request("r", prompt, max_tokens=4))
    smaller.run()
    assert isinstance(smaller.errors["r"], RequestTooLarge)


@pytest.mark.parametrize("depth", [1, 2])
@pytest.mark.parametrize(("groups", "num_blocks"), [("full", 14), ("full+window", 14)])
def test_preempted_sequences_equal_the_plain_loop(depth: int, groups: str, num_blocks: int) -> None:
    driven = DrivenEngine(depth=depth, groups=GROUPS[groups], num_blocks=num_blocks, max_num_batched_tokens=8, caching=False)
    driven.submit(*(request(f"r{i}", prompt, max_tokens=10) for i, prompt in enumerate(PROMPTS)))
    assert_plain(driven.run())
    assert driven.scheduler.sequences.counters.preemptions > 0


def test_the_sequences_of_one_request_tell_their_prompt_once() -> None:
    driven = DrivenEngine(num_blocks=12, caching=False, max_num_batched_tokens=8)
    driven.submit(request("r", list(range(13)), n=4, prompt_logprobs=0, max_tokens=14), request("s", list(range(20, 33)), max_tokens=14))
    driven.run()
    assert [len(update.prompt_logprobs) for update in driven.updates if update.prompt_logprobs and update.index] == []
    assert sum(len(update.prompt_logprobs) for update in driven.updates) == 12


@pytest.mark.parametrize(("adapter", "digest"), [(None, "ab"), ("a", ""), ("a", "abc"), ("a", "AB"), ("a", "ab" * 65)])
def test_a_digest_that_is_not_that_of_an_adapter_is_refused(adapter: str | None, digest: str) -> None:
    driven = DrivenEngine()
    driven.submit(request("r", [1], adapter=adapter, adapter_digest=digest))
    driven.run()
    assert isinstance(driven.errors["r"], InvalidRequest)
    assert driven.errors["r"].field == "adapter_digest"


def test_more_sequences_than_may_ever_wait_are_refused_for_good() -> None:
    driven = DrivenEngine(max_waiting=3)
    driven.submit(request("r", [1], n=4))
    driven.run()
    assert isinstance(driven.errors["r"], RequestTooLarge)


def test_time_in_the_inbox_counts_as_waiting() -> None:
    driven = DrivenEngine()
    driven.submit(request("r", [1, 2], deadline_at=driven.clock.now + 5))
    driven.clock.now += 3
    driven.turn()
    assert [update.queue_time_s for update in driven.updates if update.queue_time_s is not None] == [3.0]
    driven.clock.now += 2.5
    driven.run()
    assert driven.finish["r", 0] is FinishReason.DEADLINE


@pytest.mark.parametrize("depth", [1, 2])
@pytest.mark.parametrize("groups", GROUPS, ids=str)
def test_preempting_anybody_at_any_moment_changes_no_token(depth: int, groups: str) -> None:
    driven = DrivenEngine(depth=depth, groups=GROUPS[groups], num_blocks=40, max_num_batched_tokens=8)
    driven.submit(*(request(f"r{i}", prompt, max_tokens=10) for i, prompt in enumerate(PROMPTS)))
    for turn in range(40):
        driven.turn()
        if running := driven.scheduler.sequences.slots.running:
            driven.scheduler.sequences.preempt(running[turn % len(running)], driven.clock.now)
        driven.scheduler.check()
    assert_plain(driven.run())


def test_a_queue_policy_decides_the_shares_of_a_step(monkeypatch: pytest.MonkeyPatch) -> None:
    """Shares are the policy's answer: less for prefills, and a prompt is long sooner."""

    def chunks(shares: StepShares) -> list[list[int]]:
        monkeypatch.setattr(FcfsQueue, "shares", shares)
        driven = DrivenEngine(max_num_batched_tokens=16, caching=False, queue_policy="fcfs")
        driven.submit(request("first", list(range(40)), max_tokens=2), request("second", list(range(4)), max_tokens=2))
        driven.turn(3)
        plans = load_plans(driven.engine.recent_plans())
        driven.run()
        return [[count for slot, count in zip(plan.slots, plan.counts, strict=True) if slot == 0] for plan in plans]

    assert chunks(StepShares()) == [[16], [16], [8]]
    assert chunks(StepShares(prefill=0.5)) == [[8], [6], [6]], "half a step, and the prompt is long for such steps"
    assert chunks(StepShares(long_prompt_steps=1))[1] == [12], "the sequences queued behind it have their quarter first"
