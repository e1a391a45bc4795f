"""Tests that requests wait for their own grammar alone, and that what they take is given back whenever they end."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from grammar_kit import EOS, PERSON, TINY, VOCAB, compiled, regex, schema, trie
from patience import PATIENCE_S

from headrace.core.errors import InvalidRequest, Overloaded
from headrace.core.grammar import Grammar
from headrace.core.ids import PreparationId, RequestId
from headrace.core.request import EngineRequest
from headrace.core.sampling import SamplingParams
from headrace.engine.grammar.preparer import GRAMMAR, GrammarCompiler, GrammarPreparer
from headrace.engine.grammar.store import GrammarStore

pytestmark = pytest.mark.socket


class GatedCompiler(GrammarCompiler):
    """Vets a grammar only once its gate is open, and notes the order. A grammar named "bad" is invalid, "broken" raises something else."""

    def __init__(self, folder: Path = TINY, eos: tuple[int, ...] = EOS) -> None:
        super().__init__(folder, VOCAB, eos)
        self.gate = threading.Event()
        self.vetted: list[str] = []

    def vet(self, grammar: Grammar) -> int:
        assert self.gate.wait(PATIENCE_S)
        self.vetted.append(grammar.source)
        if grammar.source == "bad":
            raise InvalidRequest("grammar", "a better one")
        if grammar.source == "broken":
            raise RuntimeError("a fault of ours")
        return 0

    def compile(self, grammar: Grammar):  # type: ignore[no-untyped-def]
        return compiled(grammar)


class NotedEngine:
    """Outcomes in the order in which they are said."""

    def __init__(self) -> None:
        self.said: list[tuple[int, Exception | None]] = []
        self._changed = threading.Condition()

    def satisfied(self, preparation_id: PreparationId, what: str) -> None:
        self._note(preparation_id, what, None)

    def failed(self, preparation_id: PreparationId, what: str, error: Exception) -> None:
        self._note(preparation_id, what, error)

    def _note(self, preparation_id: PreparationId, what: str, error: Exception | None) -> None:
        assert what == GRAMMAR
        with self._changed:
            self.said.append((preparation_id, error))
            self._changed.notify_all()

    def wait(self, count: int) -> list[tuple[int, Exception | None]]:
        with self._changed:
            assert self._changed.wait_for(lambda: len(self.said) >= count, PATIENCE_S)
            return self.said


class Bench:
    def __init__(self, compiler: GrammarCompiler) -> None:
        self.compiler, self.engine = compiler, NotedEngine()
        self.store = GrammarStore(compiler)
        self.preparer = GrammarPreparer(compiler, self.store)
        self.preparer.attach(self.engine)

    def begin(self, number: int, source: str | None, tenant: str = "") -> Any:
        grammar = None if source is None else regex(source)
        params = SamplingParams(seed=0)
        request = EngineRequest(request_id=RequestId(str(number)), prompt_ids=(1,), params=params, tenant=tenant, grammar=grammar)
        return self.preparer.begin(request, PreparationId(number))

    def num_pins(self) -> int:
        return sum(held.num_pins for held in self.store._compiled.values())


@pytest.fixture
def bench() -> Iterator[Bench]:
    made = Bench(GatedCompiler())
    yield made
    made.compiler.gate.set()  # type: ignore[attr-defined]
    made.preparer.close()
    made.store.check()


def open_gate(bench: Bench) -> None:
    bench.compiler.gate.set()  # type: ignore[attr-defined]


def test_a_request_without_a_grammar_waits_for_nothing_and_starts_nothing(bench: Bench) -> None:
    assert bench.begin(1, None) == {}
    bench.preparer.end(PreparationId(1))
    assert bench.preparer._thread is None


def test_a_grammar_is_prepared_once_and_pinned_while_requests_use_it(bench: Bench) -> None:
    open_gate(bench)
    assert GRAMMAR in bench.begin(1, "a+")
    assert bench.engine.wait(1) == [(1, None)]
    assert bench.begin(2, "a+") == {}, "it is there already"
    assert bench.compiler.vetted == ["a+"]  # type: ignore[attr-defined]
    assert bench.num_pins() == 2
    bench.preparer.end(PreparationId(1))
    bench.preparer.end(PreparationId(2))
    assert bench.num_pins() == 0


def test_two_requests_that_wait_for_one_grammar_have_it_vetted_once(bench: Bench) -> None:
    bench.begin(1, "a+")
    bench.begin(2, "a+")
    open_gate(bench)
    bench.engine.wait(2)
    assert bench.compiler.vetted == ["a+"]  # type: ignore[attr-defined]
    assert bench.num_pins() == 2


def test_tenants_take_turns(bench: Bench) -> None:
    bench.begin(1, "a{1}", "greedy")
    for number in range(2, 6):
        bench.begin(number, f"a{{{number}}}", "greedy")
    bench.begin(9, "b", "modest")
    open_gate(bench)
    order = [preparation_id for preparation_id, _ in bench.engine.wait(6)]
    assert order.index(9) <= 2, "it waits for one of the other tenant's grammars, or two, not for five"


def test_a_tenant_whose_new_grammars_wait_already_is_refused_and_no_other(bench: Bench, monkeypatch: pytest.MonkeyPatch) -> None:
    """A queue that no client would wait for to its end is not made. A grammar that is there already needs no place in it."""
    monkeypatch.setattr("headrace.engine.grammar.preparer.MAX_WAITING_GRAMMARS", 3)
    open_gate(bench)
    bench.begin(1, "a", "greedy")
    bench.engine.wait(1)
    bench.compiler.gate.clear()  # type: ignore[attr-defined]
    bench.begin(2, "a{2}", "greedy")
    while bench.preparer._jobs._waiting:  # until the thread has taken it
        time.sleep(0.001)
    for number in range(3, 6):
        bench.begin(number, f"a{{{number}}}", "greedy")
    with pytest.raises(Overloaded, match="3 new grammars of this tenant wait") as refused:
        bench.begin(6, "a{6}", "greedy")
    assert refused.value.retry_after_s == pytest.approx(0.36)
    assert PreparationId(6) not in bench.preparer._open, "nothing is held for what was refused"
    assert bench.begin(10, "a", "greedy") == {}
    assert GRAMMAR in bench.begin(11, "b", "modest")


def test_what_is_refused_and_what_breaks_is_said_and_holds_nothing(bench: Bench) -> None:
    open_gate(bench)
    bench.begin(1, "bad")
    bench.begin(2, "broken")
    bench.begin(3, "a")
    said = dict(bench.engine.wait(3))
    assert isinstance(said[1], InvalidRequest)
    assert isinstance(said[2], RuntimeError)
    assert said[3] is None
    for number in (1, 2):
        bench.preparer.end(PreparationId(number))
    assert bench.num_pins() == 1


def test_a_request_that_ends_while_it_waits_or_is_prepared_holds_nothing(bench: Bench) -> None:
    bench.begin(1, "a")
    bench.begin(2, "b")
    bench.begin(3, "c")
    bench.preparer.end(PreparationId(2))
    bench.preparer.end(PreparationId(1))
    open_gate(bench)
    while 3 not in dict(bench.engine.wait(1)):
        bench.engine.wait(len(bench.engine.said) + 1)
    assert "b" not in bench.compiler.vetted  # type: ignore[attr-defined]
    assert bench.num_pins() == 1


@pytest.mark.parametrize(("eos", "has_tokenizer", "said"), [((), True, "no end token"), (EOS, False, "no tokenizer.json")])
def test_a_model_that_can_have_no_grammar_refuses_it_by_name(tmp_path: Path, eos: tuple[int, ...], has_tokenizer: bool, said: str) -> None:
    bench = Bench(GrammarCompiler(TINY if has_tokenizer else tmp_path, VOCAB, eos))
    with pytest.raises(InvalidRequest, match=f"grammar: expected none: .*{said}"):
        bench.begin(1, "a")
    bench.preparer.close()


def test_a_grammar_dropped_from_the_store_is_compiled_again_without_a_second_vetting(bench: Bench) -> None:
    open_gate(bench)
    bench.begin(1, "a")
    bench.engine.wait(1)
    bench.preparer.end(PreparationId(1))
    bench.store._compiled.clear()
    bench.store.num_bytes = 0
    assert GRAMMAR in bench.begin(2, "a")
    bench.engine.wait(2)
    assert bench.compiler.vetted == ["a"]  # type: ignore[attr-defined]


@pytest.mark.process
def test_the_real_compiler_vets_in_its_process_and_compiles_here() -> None:
    compiler = GrammarCompiler(TINY, VOCAB, EOS)
    try:
        assert compiler.vet(schema(PERSON)) >= 0
        assert not compiler.compile(schema(PERSON)).is_error()
        assert compiler.num_words == trie().num_words
    finally:
        compiler.close()
