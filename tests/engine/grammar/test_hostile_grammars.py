"""Hostile grammars are refused by name or served within their limits, and memory stays flat over thousands of distinct ones."""

from __future__ import annotations

import random
import threading
from collections.abc import Iterator
from typing import TYPE_CHECKING

import pytest
from figures import Figure
from grammar_kit import EOS, TINY, VOCAB, compiled, mask_of, regex, schema
from hostile_grammars import Case, cases

from headrace.core.errors import InvalidRequest
from headrace.core.grammar import Grammar
from headrace.core.ids import PreparationId, RequestId
from headrace.core.request import EngineRequest
from headrace.core.sampling import SamplingParams
from headrace.engine.grammar.limits import STATES_BYTES, STORE_BYTES, start_deep_thread
from headrace.engine.grammar.preparer import GrammarCompiler, GrammarPreparer
from headrace.engine.grammar.store import GrammarKey, GrammarStore

if TYPE_CHECKING:
    from llguidance import LLMatcher

pytestmark = pytest.mark.process

NUM_HOSTILE = 200
FEW = cases()[3::11]
MAX_GROWTH_BYTES = 24 << 20


@pytest.fixture(scope="module")
def compiler() -> Iterator[GrammarCompiler]:
    made = GrammarCompiler(TINY, VOCAB, EOS)
    made.vet(regex("a"))
    yield made
    made.close()


def outcome(compiler: GrammarCompiler, grammar: Grammar) -> str:
    """Why it is refused; "" for one that was vetted, and then compiled and matched in this process, on a thread as an engine's."""
    try:
        compiler.vet(grammar)
    except InvalidRequest as error:
        return str(error)
    raised: list[BaseException] = []

    def use() -> None:
        try:
            wander(compiler.compile(grammar))
        except BaseException as error:
            raised.append(error)

    start_deep_thread(use, "hostile").join()
    assert not raised, raised
    return ""


def wander(matcher: LLMatcher) -> None:
    """Write forty tokens at random. A mask over its limits ends the output, as it ends a sequence."""
    draw = random.Random(1)
    for _ in range(40):
        mask = mask_of(matcher)
        if matcher.is_error() or matcher.is_stopped() or not mask.any():
            return
        matcher.consume_token(int(draw.choice(mask.nonzero()[0].tolist())))


def check(compiler: GrammarCompiler, chosen: list[Case]) -> None:
    process = compiler._vetter._process
    assert process is not None
    refused = {name: outcome(compiler, grammar) for name, grammar in chosen}
    assert compiler._vetter._process is process, "one process vetted all"
    assert compiler.vet(schema('{"type":"integer"}')) >= 0
    for name, why in refused.items():
        assert not why or (why.startswith("grammar: expected ") and len(why) < 700), (name, why)


def test_some_hostile_grammars_are_refused_by_name_or_served(compiler: GrammarCompiler) -> None:
    check(compiler, FEW)


@pytest.mark.slow
def test_every_hostile_grammar_is_refused_by_name_or_served(compiler: GrammarCompiler) -> None:
    assert len(cases()) >= NUM_HOSTILE
    check(compiler, cases())


def anonymous_bytes() -> int:
    """Resident memory of this process that is not a file's."""
    with open("/proc/self/status", encoding="ascii") as file:
        return next(int(line.split()[1]) << 10 for line in file if line.startswith("RssAnon"))


def distinct(number: int) -> Grammar:
    return schema(
        f'{{"type":"object","properties":{{"name_{number}":{{"type":"string","maxLength":{number % 50 + 1}}},'
        f'"kind":{{"enum":["a{number}","b{number}"]}}}},"required":["name_{number}"],"additionalProperties":false}}'
    )


@pytest.mark.pure
@pytest.mark.timing
def test_memory_is_flat_over_distinct_grammars(figure: Figure) -> None:
    """The store is full after about a hundred; from then on each new grammar takes the place of another."""
    compiler = GrammarCompiler(TINY, VOCAB, EOS)
    store = GrammarStore(compiler)
    num_kept = STORE_BYTES // STATES_BYTES
    after_full = 0
    for number in range(3 * num_kept):
        key = GrammarKey(f"tenant {number % 5}", distinct(number))
        store.add(key, compiled(key.grammar), 0)
        wander(store.template(key.grammar).deep_copy())
        store.unpin(key)
        if number == num_kept + num_kept // 2:
            after_full = anonymous_bytes()
    store.check()
    assert len(store) <= num_kept
    figure("growth after the store was full", (anonymous_bytes() - after_full) / 2**20, 8, "MiB")


class WaitedFor:
    """An engine that waits for the outcome of each preparation."""

    def __init__(self) -> None:
        self._said = threading.Event()
        self.error: Exception | None = None

    def satisfied(self, preparation_id: PreparationId, what: str) -> None:
        self._said.set()

    def failed(self, preparation_id: PreparationId, what: str, error: Exception) -> None:
        self.error = error
        self._said.set()

    def wait(self) -> None:
        assert self._said.wait(300)
        assert self.error is None
        self._said.clear()


@pytest.mark.slow
@pytest.mark.timeout(3600)
def test_memory_is_flat_over_ten_thousand_requests_with_distinct_grammars() -> None:
    """Vetted, compiled, matched and given back, one after the other, by five tenants."""
    compiler = GrammarCompiler(TINY, VOCAB, EOS)
    store, engine = GrammarStore(compiler), WaitedFor()
    preparer = GrammarPreparer(compiler, store)
    preparer.attach(engine)
    sizes = []
    for number in range(10_000):
        grammar = distinct(number)
        params = SamplingParams(seed=0)
        request = EngineRequest(
            request_id=RequestId(str(number)), prompt_ids=(1,), params=params, tenant=f"tenant {number % 5}", grammar=grammar
        )
        assert preparer.begin(request, PreparationId(number))
        engine.wait()
        wander(store.template(grammar).deep_copy())
        preparer.end(PreparationId(number))
        if number % 1000 == 999:
            sizes.append(anonymous_bytes())
    preparer.close()
    store.check()
    print("resident MiB after each thousand:", [size >> 20 for size in sizes])
    assert max(sizes[1:]) - sizes[0] < MAX_GROWTH_BYTES
