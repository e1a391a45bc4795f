"""Tests the reason that a request is told for the end of its match with the prefix cache, against a reference that forgets nothing."""

from __future__ import annotations

from collections import defaultdict
from typing import Any

import pytest
from engine_kit import FULL, WINDOW, DrivenEngine, request
from hypothesis import Phase, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from headrace.core.hashing import TENANT_SALT_BYTES, BlockHash
from headrace.core.ids import RequestId
from headrace.core.update import MissReason
from headrace.policy.kvcache.manager import KvManager
from headrace.policy.kvcache.misses import MAX_BEGINNINGS, NUM_EVICTED, Beginnings, EvictedBlocks
from headrace.policy.kvcache.pool import BlockPool
from headrace.policy.sequence import SeqState, Sequence

pytestmark = pytest.mark.pure

TENANT, OTHER = b"t" * TENANT_SALT_BYTES, b"o" * TENANT_SALT_BYTES


def slot(identity: BlockHash) -> int:
    return int.from_bytes(identity[:8], "little") % NUM_EVICTED


class Reference:
    """Notes every block that a pool was ever given, and every first block that was asked for with its salt; checks each answer."""

    def __init__(self, kv: KvManager) -> None:
        self.kv = kv
        self.told: list[MissReason] = []
        self._cached: list[set[BlockHash]] = [set() for _ in kv.pools]
        self._ever: list[set[BlockHash]] = [set() for _ in kv.pools]
        self._salts: defaultdict[tuple[int, ...], set[bytes]] = defaultdict(set)
        for number, pool in enumerate(kv.pools):
            self._watch(number, pool)
        self._answer, kv.miss_reason = kv.miss_reason, self.miss_reason  # type: ignore[method-assign]

    def _watch(self, number: int, pool: BlockPool) -> None:
        register, forget, unregister = pool.register, pool._forget, pool.unregister

        def registered(block: int, identity: BlockHash, tenant: str = "") -> bool:
            is_new = register(block, identity, tenant)
            if is_new:
                self._cached[number].add(identity)
                self._ever[number].add(identity)
            return is_new

        def forgotten(block: int) -> None:
            if (identity := pool.identity(block)) is not None:
                self._cached[number].remove(identity)
            forget(block)

        def unregistered(block: int) -> None:
            """It was not left in the cache: no eviction."""
            identity = pool.identity(block)
            unregister(block)
            if identity is not None and identity not in pool.evicted:
                self._ever[number].remove(identity)

        pool.register, pool._forget, pool.unregister = registered, forgotten, unregistered  # type: ignore[method-assign]

    def miss_reason(self, seq: Sequence, num_tokens: int) -> MissReason:
        expected = self._expected(seq, num_tokens)
        told = self._answer(seq, num_tokens)
        assert expected is None or told is expected
        self.told.append(told)
        return told

    def _expected(self, seq: Sequence, num_tokens: int) -> MissReason | None:
        size, salt, tokens = self.kv.block_size, seq.request.salt, seq.tokens
        if not (self.kv.caching and seq.request.prefix_caching) or seq.request.params.prompt_logprobs is not None:
            return MissReason.NOT_USED
        if num_tokens + size >= len(tokens):
            return MissReason.LESS_THAN_A_BLOCK
        first = tuple(tokens[:size])
        salts = set(self._salts[first])
        if not num_tokens:
            self._salts[first].add(salt)
        missing = [
            (number, identity)
            for number, group in enumerate(self.kv.groups)
            for index, identity in enumerate(seq.hashes[: num_tokens // size + 1])
            if identity not in self._cached[number]
            if group.window is None or index >= (num_tokens + size - group.window + 1) // size
        ]
        if any(slot(identity) == slot(other) for number, identity in missing for other in self._ever[number] - {identity}):
            return None  # one evicted block has taken the place of another
        if any(identity in self._ever[number] for number, identity in missing):
            return MissReason.EVICTED
        is_salted = not num_tokens and any(other != salt and other[:TENANT_SALT_BYTES] == salt[:TENANT_SALT_BYTES] for other in salts)
        return MissReason.ANOTHER_SALT if is_salted else MissReason.NEVER_SEEN


class MissMachine(RuleBasedStateMachine):
    @initialize(groups=st.sampled_from([(FULL,), (FULL, WINDOW), (WINDOW,)]), num_blocks=st.integers(9, 16), depth=st.sampled_from([1, 2]))
    def build(self, groups: Any, num_blocks: int, depth: int) -> None:
        self.driven = DrivenEngine(
            groups=groups, num_blocks=num_blocks, depth=depth, max_num_seqs=4, max_num_batched_tokens=9, max_model_len=32
        )
        self.reference = Reference(self.driven.kv)
        self.count = 0

    @rule(
        asked=st.lists(
            st.tuples(
                st.integers(0, 1),
                st.integers(5, 18),
                st.sampled_from([TENANT, TENANT + b"1", TENANT + b"2", OTHER, OTHER + b"1"]),
                st.sampled_from([{}] * 8 + [{"prefix_caching": False}, {"prompt_logprobs": 1}, {"n": 2}]),
            ),
            min_size=1,
            max_size=4,
        ),
        turns=st.sampled_from([1, 4, 40]),
    )
    def submit(self, asked: list[tuple[int, int, bytes, dict[str, Any]]], turns: int) -> None:
        for family, length, salt, changes in asked:
            self.count += 1
            prompt = [family * 20 + number for number in range(length)]
            self.driven.submit(request(f"r{self.count}", prompt, max_tokens=6, salt=salt, **changes))
        self.driven.turn(turns)

    @rule(back=st.integers(0, 3))
    def cancel(self, back: int) -> None:
        self.driven.engine.cancel(RequestId(f"r{self.count - back}"))

    @rule(back=st.integers(0, 3), keep=st.integers(0, 6))
    def finish(self, back: int, keep: int) -> None:
        self.driven.engine.finish(RequestId(f"r{self.count - back}"), 0, keep)

    @precondition(lambda self: any(seq.state is SeqState.RUNNING for seq in self.driven.scheduler.sequences.alive()))
    @rule()
    def preempt(self) -> None:
        running = [seq for seq in self.driven.scheduler.sequences.alive() if seq.state is SeqState.RUNNING]
        self.driven.scheduler.sequences.preempt(running[0], self.driven.clock.now)

    @invariant()
    def adds_up(self) -> None:
        if hasattr(self, "driven"):
            self.driven.scheduler.check()

    def teardown(self) -> None:
        if hasattr(self, "driven"):
            self.driven.run()
            self.driven.scheduler.check()
            told = [update.miss_reason for update in self.driven.updates if update.miss_reason is not None]
            assert set(told) <= set(self.reference.told)


MissMachine.TestCase.settings = settings(
    max_examples=25, stateful_step_count=20, deadline=None, phases=(Phase.explicit, Phase.reuse, Phase.generate)
)
test_reasons_are_those_of_a_reference_that_forgets_nothing = MissMachine.TestCase


def told(driven: DrivenEngine, name: str, prompt: list[int], **changes: Any) -> tuple[int | None, MissReason | None]:
    """What the update with the first token says; all others say nothing."""
    driven.submit(request(name, prompt, max_tokens=4, **changes))
    driven.run()
    first, *others = [update for update in driven.updates if update.request_id == name]
    assert all(update.miss_reason is None for update in others)
    return first.num_cached_tokens, first.miss_reason


def test_each_reason_is_told_where_the_match_ended() -> None:
    driven, prompt = DrivenEngine(num_blocks=12), list(range(14))
    assert told(driven, "new", prompt, salt=TENANT) == (0, MissReason.NEVER_SEEN)
    assert told(driven, "same", prompt, salt=TENANT) == (12, MissReason.LESS_THAN_A_BLOCK)
    assert told(driven, "differs", [*range(8), 50, 51, 52, 53, 54], salt=TENANT) == (8, MissReason.NEVER_SEEN)
    assert told(driven, "salted", prompt, salt=TENANT + b"x") == (0, MissReason.ANOTHER_SALT)
    assert told(driven, "short", [1, 2, 3], salt=TENANT) == (0, MissReason.LESS_THAN_A_BLOCK)
    assert told(driven, "scored", prompt, salt=TENANT, prompt_logprobs=1) == (0, MissReason.NOT_USED)
    assert told(driven, "flood", [70 + number % 20 for number in range(36)], salt=OTHER) == (0, MissReason.NEVER_SEEN)
    assert told(driven, "again", prompt, salt=TENANT) == (0, MissReason.EVICTED)


def test_no_tenant_learns_what_another_one_sent() -> None:
    """Whatever the salts: cached, evicted and never sent texts of another tenant look alike."""
    driven, prompt = DrivenEngine(num_blocks=12), list(range(14))
    told(driven, "theirs", prompt, salt=OTHER)
    told(driven, "salted", prompt, salt=OTHER + b"x")
    for salt in (b"", TENANT, OTHER[:-1], b"p" + OTHER, b"s" * TENANT_SALT_BYTES + b"x"):
        assert told(driven, f"mine-{salt.hex()}", prompt, salt=salt) == (0, MissReason.NEVER_SEEN)


def test_what_is_remembered_is_bounded() -> None:
    evicted, beginnings = EvictedBlocks(), Beginnings()

    def identity(number: int) -> BlockHash:
        return BlockHash(number.to_bytes(16, "little"))

    for number in range(1, 2 * NUM_EVICTED):
        evicted.add(identity(number))
        beginnings.add(identity(number), identity(0))
    assert [identity(number) in evicted for number in (1, NUM_EVICTED - 1, NUM_EVICTED, 2 * NUM_EVICTED - 1)] == [False, False, True, True]
    assert len(evicted._slots) == NUM_EVICTED
    assert len(beginnings._identities) == MAX_BEGINNINGS
    assert beginnings.add(identity(2 * NUM_EVICTED - 1), identity(1))
    assert not beginnings.add(identity(1), identity(1)), "long forgotten"
