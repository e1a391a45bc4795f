"""Tests the store of compiled grammars: bounded in bytes, in all and by tenant; grammars in use stay; no tenant finds another's."""

from __future__ import annotations

import pytest
from grammar_kit import compiled, regex, trie
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from headrace.core.errors import Overloaded
from headrace.core.grammar import Grammar
from headrace.engine.grammar.limits import STATES_BYTES
from headrace.engine.grammar.store import GrammarKey, GrammarStore

pytestmark = pytest.mark.pure

ONE = STATES_BYTES
TEMPLATE = compiled(regex("[0-9]"))


class CountingCompiler:
    def __init__(self) -> None:
        self.num_words = trie().num_words
        self.num_compiled = 0

    def compile(self, grammar: Grammar):  # type: ignore[no-untyped-def]
        self.num_compiled += 1
        return compiled(grammar)


def key(number: int, tenant: str = "a") -> GrammarKey:
    return GrammarKey(tenant, regex(f"[0-9]{{{number + 1}}}"))


def made(num: int = 4, num_tenant: int = 3) -> GrammarStore:
    return GrammarStore(CountingCompiler(), max_bytes=num * ONE, tenant_bytes=num_tenant * ONE)


def add(store: GrammarStore, which: GrammarKey, *, keep: bool = False) -> None:
    store.add(which, TEMPLATE, 0)
    if not keep:
        store.unpin(which)


def test_the_least_recently_used_idle_grammar_is_dropped_first() -> None:
    store = made()
    add(store, key(0), keep=True)
    add(store, key(1))
    add(store, key(2))
    assert store.pin(key(1))
    store.unpin(key(1))
    add(store, key(3))
    assert [store.pin(key(number)) for number in range(4)] == [True, True, False, True]
    store.check()


def test_a_tenant_has_a_quota_and_its_grammars_are_its_own() -> None:
    store = made()
    for number in range(5):
        add(store, key(number))
    assert len(store) == 3
    assert not store.pin(key(4, "b"))
    add(store, key(0, "b"))
    assert len(store) == 4
    assert store.pin(key(4))


def test_a_grammar_for_which_those_in_use_leave_no_room_is_refused() -> None:
    store = made()
    for number in range(3):
        add(store, key(number), keep=True)
    with pytest.raises(Overloaded, match="this tenant's grammars in use"):
        add(store, key(3))
    add(store, key(0, "b"), keep=True)
    with pytest.raises(Overloaded, match="the grammars in use take all"):
        add(store, key(1, "b"))
    store.unpin(key(1))
    add(store, key(3))
    store.check()


def test_a_matcher_is_the_callers_own_and_a_grammar_that_is_not_prepared_is_compiled() -> None:
    compiler = CountingCompiler()
    store = GrammarStore(compiler)
    grammar = key(0).grammar
    assert store.template(grammar).deep_copy().consume_token(26)
    assert compiler.num_compiled == 1
    store.add(key(0), compiled(grammar), 0)
    first, second = store.template(grammar).deep_copy(), store.template(grammar).deep_copy()
    assert first.consume_token(26)
    assert first.is_accepting()
    assert not second.is_accepting()
    assert compiler.num_compiled == 1
    renewed = store.renewed(grammar)
    assert compiler.num_compiled == 2
    assert store.template(grammar) is renewed


class StoreMachine(RuleBasedStateMachine):
    """Pins are counted in a plain list; a store never holds more than its bounds, nor drops what is pinned."""

    def __init__(self) -> None:
        super().__init__()
        self.store = made(num=6, num_tenant=4)
        self.pinned: list[GrammarKey] = []

    @rule(number=st.integers(0, 9), tenant=st.sampled_from("abc"))
    def use(self, number: int, tenant: str) -> None:
        which = key(number, tenant)
        try:
            if not self.store.pin(which):
                self.store.add(which, TEMPLATE, 0)
        except Overloaded:
            assert len({held for held in self.pinned if held.tenant == tenant}) == 4 or len(set(self.pinned)) == 6
        else:
            self.pinned.append(which)

    @precondition(lambda self: self.pinned)
    @rule(data=st.data())
    def release(self, data: st.DataObject) -> None:
        self.store.unpin(self.pinned.pop(data.draw(st.integers(0, len(self.pinned) - 1))))

    @invariant()
    def adds_up(self) -> None:
        self.store.check()
        for which in set(self.pinned):
            assert self.store.pin(which), "what is in use is there"
            self.store.unpin(which)


TestStore = StoreMachine.TestCase
TestStore.settings = settings(max_examples=60, stateful_step_count=40, deadline=None)
