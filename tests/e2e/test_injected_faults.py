"""Raises an exception at each place of the engine in turn: only the sequence it belongs to fails, and other answers stay byte-identical.

The real engine in this process. `failpoint_kit.sites` knows its places by reading the source, so a new one is tested here by itself.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import nullcontext
from dataclasses import replace
from typing import Any

import pytest
from failpoint_kit import armed, sites
from grammar_kit import vetting_here
from plain_loop import Checkpoint
from real_engine import RealEngine, greedy_request

from headrace.core.errors import SequenceFailed
from headrace.core.grammar import Grammar, GrammarKind
from headrace.core.ids import RequestId
from headrace.core.plan import Plan, Result
from headrace.core.request import EngineRequest
from headrace.core.update import FinishReason
from headrace.engine.runner.model_runner import ModelRunner, OverlappedRunner

pytestmark = pytest.mark.pure

SITES = [name for name in sites() if not name.startswith("device.")]
"""A device's runner has places of its own, which tests/engine/runner arms."""
COUNT = 8
CULPRIT = "r2"
MESSAGE = "the model step failed for this sequence"
PRINTABLE = Grammar(GrammarKind.REGEX, "[ -~]{400}")
"""A grammar that ends no answer of these tests."""


@pytest.fixture(autouse=True, scope="module")
def vetted_here() -> Iterator[None]:
    with vetting_here():
        yield


class Poison:
    """Makes a place raise whenever a step computes the culprit, from its n-th step on; `hits` counts."""

    def __init__(self, engine: RealEngine, site: str, culprit: EngineRequest, *, first_step: int) -> None:
        runner: Any = engine.engine._steps.runner
        inner = runner._runner if isinstance(runner, OverlappedRunner) else runner
        assert isinstance(inner, ModelRunner)
        self.hits = 0
        self._site, self._prompt, self._first_step = site, list(culprit.prompt_ids), first_step
        self._slots: set[int] = set()
        self._execute: Callable[[Plan], Result] = inner.execute
        inner.execute = self._poisoned  # type: ignore[method-assign]

    def _poisoned(self, plan: Plan) -> Result:
        for started in plan.started:
            if list(started.token_ids[: started.num_prompt_tokens]) == self._prompt:
                self._slots.add(started.slot)
            else:
                self._slots.discard(started.slot)
        its_rows = [start for slot, start in zip(plan.slots, plan.starts, strict=True) if slot in self._slots]
        is_time = any(start >= self._first_step for start in its_rows)
        with armed(self._site, times=None) if is_time else nullcontext() as fault:
            try:
                return self._execute(plan)
            finally:
                self.hits += fault.hits if fault else 0


def requests_of(checkpoint: Checkpoint, site: str = "") -> list[EngineRequest]:
    """Greedy ones with penalties too small to matter, so that every place is passed; the culprit asks for prompt log-probabilities.

    site  the place that will raise: for one that only grammars pass, the culprit has a grammar
    """
    return [
        greedy_request(
            f"r{number}",
            prompt,
            max_tokens=COUNT,
            presence_penalty=1e-9,
            prompt_logprobs=1 if f"r{number}" == CULPRIT else None,
            logprobs=0,
            **({"grammar": PRINTABLE, "ignore_eos": False} if f"r{number}" == CULPRIT and site.startswith("grammar.") else {}),
        )
        for number, prompt in enumerate(checkpoint.prompts[:5])
    ]


def whole_answers(engine: RealEngine, checkpoint: Checkpoint, requests: list[EngineRequest]) -> dict[str, list[int]]:
    """Each request's answer without a fault. A request with a grammar is run here, by itself, which also prepares its grammar."""
    answers = {}
    for request in requests:
        name = str(request.request_id)
        if request.grammar is None:
            answers[name] = checkpoint.plain.greedy(request.prompt_ids, COUNT)
        else:
            engine.run(replace(request, request_id=RequestId("whole"), prefix_caching=False))
            answers[name] = engine.answer("whole")
            assert len(answers[name]) == COUNT
    return answers


@pytest.mark.parametrize("checkpoint", ["random"], indirect=True)
@pytest.mark.parametrize(
    ("moment", "depth"),
    [("prefill", 2), ("decode", 1), pytest.param("prefill", 1, marks=pytest.mark.slow), pytest.param("decode", 2, marks=pytest.mark.slow)],
)
@pytest.mark.parametrize("site", SITES)
def test_only_the_culprit_fails(checkpoint: Checkpoint, site: str, moment: str, depth: int) -> None:
    if (site, moment) == ("runner.prompt_logprobs", "decode"):
        moment = "prefill"  # log-probabilities of a prompt are computed with it
    requests = requests_of(checkpoint, site)
    culprit = next(request for request in requests if request.request_id == CULPRIT)
    with RealEngine(checkpoint.folder, depth=depth, max_num_batched_tokens=40) as engine:
        answers = whole_answers(engine, checkpoint, requests)
        poison = Poison(engine, site, culprit, first_step=0 if moment == "prefill" else len(culprit.prompt_ids) + 3)
        engine.run(*requests)
        assert poison.hits >= 2, "in the crowd, and again alone"
        assert engine.finish[CULPRIT, 0] is FinishReason.ERROR
        assert engine.errors[CULPRIT] == MESSAGE
        for request in requests:
            name = str(request.request_id)
            whole = answers[name]
            if name == CULPRIT:
                assert engine.answer(name) == whole[: 0 if moment == "prefill" else 4]
            else:
                assert engine.answer(name) == whole
                assert engine.finish[name, 0] is FinishReason.LENGTH


@pytest.mark.parametrize("checkpoint", ["random"], indirect=True)
@pytest.mark.parametrize("depth", [1, 2])
@pytest.mark.parametrize("site", SITES)
def test_a_fault_that_passes_costs_nobody_anything(checkpoint: Checkpoint, site: str, depth: int) -> None:
    requests = requests_of(checkpoint, site)
    with RealEngine(checkpoint.folder, depth=depth, max_num_batched_tokens=40) as engine:
        answers = whole_answers(engine, checkpoint, requests)
        with armed(site, skip=0 if site == "runner.prompt_logprobs" else 4) as fault:
            engine.run(*requests)
        assert fault.hits == 1
        for request in requests:
            assert engine.answer(str(request.request_id)) == answers[str(request.request_id)]


def _raise_once(monkeypatch: pytest.MonkeyPatch, owner: object, name: str, *, when: Callable[..., bool] = lambda *args: True) -> list[str]:
    """`owner.name` raises at the first call for which `when` holds. Returns a list that grows with the raises."""
    original = getattr(owner, name)
    raised: list[str] = []

    def call(*args: Any, **kwargs: Any) -> Any:
        if not raised and when(*args):
            raised.append(name)
            raise RuntimeError(f"injected into {name}")
        return original(*args, **kwargs)

    monkeypatch.setattr(owner, name, call)
    return raised


@pytest.mark.parametrize("checkpoint", ["random"], indirect=True)
@pytest.mark.parametrize("depth", [1, 2])
@pytest.mark.parametrize("name", ["_plan_decodes", "_plan_waiting", "_freeze"])
def test_a_plan_that_could_not_be_made_is_made_again(
    checkpoint: Checkpoint, monkeypatch: pytest.MonkeyPatch, name: str, depth: int
) -> None:
    requests = requests_of(checkpoint)
    with RealEngine(checkpoint.folder, depth=depth, max_num_batched_tokens=40) as engine:
        raised: list[str] = []

        def inject(turn: int) -> None:
            if turn == 3:
                raised.append(name)
                scheduler = engine.engine.scheduler
                owner = scheduler if hasattr(scheduler, name) else scheduler._planner
                monkeypatch.setattr(owner, name, _failing_once(owner, name))

        engine.run(*requests, each_turn=inject)
        assert raised
        for request in requests:
            assert engine.answer(str(request.request_id)) == checkpoint.plain.greedy(request.prompt_ids, COUNT)


def _failing_once(owner: object, name: str) -> Callable[..., Any]:
    """The method, except that its next call raises."""
    original = getattr(owner, name)
    calls: list[int] = []

    def call(*args: Any) -> Any:
        calls.append(1)
        if len(calls) == 1:
            raise RuntimeError(f"injected into {name}")
        return original(*args)

    return call


@pytest.mark.parametrize("checkpoint", ["random"], indirect=True)
def test_a_request_that_cannot_be_taken_in_is_refused_alone(checkpoint: Checkpoint, monkeypatch: pytest.MonkeyPatch) -> None:
    requests = requests_of(checkpoint)
    with RealEngine(checkpoint.folder) as engine:
        scheduler = engine.engine.scheduler.sequences
        raised = _raise_once(monkeypatch, scheduler, "add", when=lambda request, *_: request.request_id == CULPRIT)
        engine.run(*requests)
        assert raised
        assert isinstance(engine.refused[CULPRIT], SequenceFailed)
        for request in requests:
            if request.request_id != CULPRIT:
                assert engine.answer(str(request.request_id)) == checkpoint.plain.greedy(request.prompt_ids, COUNT)


@pytest.mark.parametrize("checkpoint", ["random"], indirect=True)
def test_a_finish_that_cannot_be_carried_out_ends_its_request_alone(checkpoint: Checkpoint, monkeypatch: pytest.MonkeyPatch) -> None:
    requests = requests_of(checkpoint)
    with RealEngine(checkpoint.folder) as engine:
        raised = _raise_once(monkeypatch, engine.engine.scheduler.sequences, "finish")

        def stop_string(turn: int) -> None:
            if turn == 4:
                culprit = next(request for request in requests if request.request_id == CULPRIT)
                engine.engine.finish(culprit.request_id, 0, 1)

        engine.run(*requests, each_turn=stop_string)
        assert raised
        assert engine.finish[CULPRIT, 0] is FinishReason.CANCELLED
        for request in requests:
            if request.request_id != CULPRIT:
                assert engine.answer(str(request.request_id)) == checkpoint.plain.greedy(request.prompt_ids, COUNT)
