"""Tests `LLM` in a fork of its process, where its threads are gone. The test stands on the fork's side by counting one."""

from __future__ import annotations

import pickle
from collections.abc import Callable

import pytest

from headrace.core.errors import CheckpointError, ConfigError, HeadraceError, InvalidRequest, ModelNotFound, Overloaded
from headrace.core.sampling import SamplingParams
from headrace.engine.build import build_engine
from headrace.engine.config import EngineConfig
from headrace.llm.api import LLM
from headrace.machine.forks import FORKS, ForkedProcess, Forks

pytestmark = pytest.mark.pure

MakeLLM = Callable[..., LLM]
TWO = SamplingParams(seed=1, max_tokens=2)


@pytest.mark.parametrize(
    "call",
    [
        lambda llm: llm.generate("Hi", TWO),
        lambda llm: llm.generate([], TWO),
        lambda llm: llm.chat([{"role": "user", "content": "Hi"}], TWO),
        lambda llm: llm.chat([{"role": "user", "content": "Hi"}], chat_template="of its own"),
    ],
)
def test_every_call_is_refused_at_once(make_llm: MakeLLM, monkeypatch: pytest.MonkeyPatch, call: Callable[[LLM], object]) -> None:
    """Also where another thread of the parent was generating, whose lock nobody will release here."""
    llm = make_llm()
    with llm._lock, monkeypatch.context() as patch:
        patch.setattr(FORKS, "count", FORKS.count + 1)
        with pytest.raises(RuntimeError, match=r'get_context\("spawn"\)') as caught:
            call(llm)
    assert isinstance(caught.value, ForkedProcess)
    assert len(llm.generate("Hi", TWO)) == 1, "the parent goes on"


def test_leaving_in_a_fork_ends_nothing_of_the_parents(make_llm: MakeLLM, monkeypatch: pytest.MonkeyPatch) -> None:
    llm = make_llm()
    with llm._lock, monkeypatch.context() as patch:
        patch.setattr(FORKS, "count", FORKS.count + 1)
        llm.shutdown()
        with llm:
            pass
    assert llm.is_open
    assert len(llm.generate("Hi", TWO)) == 1


def test_an_llm_that_is_made_in_the_fork_is_used_there(make_llm: MakeLLM, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(FORKS, "count", FORKS.count + 1)
    assert len(make_llm().generate("Hi", TWO)) == 1


def test_no_engine_is_made_in_a_fork_of_a_process_that_has_made_one() -> None:
    forks = Forks()
    forks.begin_engine()
    forks.begin_engine()
    forks.add()
    for _ in range(2):
        with pytest.raises(ForkedProcess):
            forks.begin_engine()
    forks.add()
    with pytest.raises(ForkedProcess, match="make its own LLM"):
        forks.begin_engine()


def test_a_fork_of_a_process_that_has_made_none_makes_its_own() -> None:
    forks = Forks()
    forks.add()
    forks.begin_engine()
    forks.begin_engine()


def test_the_engines_weights_are_not_touched_in_a_fork(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(FORKS, "engines_at", FORKS.count - 1)
    with pytest.raises(ForkedProcess):
        build_engine(EngineConfig(model="/no/such/folder"), lambda _: None)


@pytest.mark.parametrize(
    "error",
    [
        ForkedProcess(),
        InvalidRequest("top_p", "0 < top_p <= 1", 5, "Send less."),
        ModelNotFound("x", ["a"]),
        Overloaded("later", retry_after_s=3.0),
        ConfigError("model", "is wrong", "Write another."),
        CheckpointError("config.json", "is wrong"),
    ],
)
def test_errors_come_back_whole_from_another_process(error: HeadraceError) -> None:
    """A worker's error could not be read by the process that waits for it: the executor was broken instead."""
    again = pickle.loads(pickle.dumps(error))
    assert (type(again), str(again), vars(again)) == (type(error), str(error), vars(error))
