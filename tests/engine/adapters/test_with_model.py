"""Tests adapters in an engine with a real model: each request is answered with its adapter's weights, whatever is beside it."""

from __future__ import annotations

from collections import Counter
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from adapter_kit import save_adapter
from device_kit import HostLaunches
from plain_choice import PlainChoice
from random_speculation import decide_at_random
from real_engine import RealEngine, greedy_request
from runner_kit import save_tiny_llama

from headrace.bundled import DEFAULT_MODEL, bundled_adapter, bundled_path
from headrace.bundled import DRAFT_MODEL as BUNDLED_DRAFT
from headrace.core.adapters import AdapterSource
from headrace.core.errors import CheckpointError
from headrace.core.request import EngineRequest
from headrace.core.speculation import DRAFT_MODEL, NGRAM, SpeculativeConfig
from headrace.engine.runner.device.runner import DeviceRunner
from headrace.policy.step_builder import StepRow
from headrace.tensor.device import Cpu
from headrace.tensor.kernels import reference

pytestmark = pytest.mark.socket

SPACE: dict[str, Any] = {"kernels": "reference", "enable_lora": True, "max_lora_rank": 4}
PROMPTS = ([5, 6, 7, 8, 9, 10], [5, 6, 7, 8, 9, 11], [3])


@pytest.fixture(scope="module")
def base(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_tiny_llama(tmp_path_factory.mktemp("tiny-llama"))


@pytest.fixture
def sources(base: Path, tmp_path: Path) -> tuple[AdapterSource, ...]:
    return tuple(AdapterSource(name=name, path=str(save_adapter(tmp_path / name, base, seed))) for seed, name in enumerate("ab"))


def asked(engine: RealEngine, name: str, adapter: str | None, prompt: list[int], **changes: Any) -> EngineRequest:
    digest = engine.engine.info.adapters[adapter] if adapter else ""
    return greedy_request(name, prompt, adapter=adapter, adapter_digest=digest, **changes)


def everything(engine: RealEngine) -> list[EngineRequest]:
    return [
        asked(engine, f"{adapter} {number}", adapter, prompt, n=1 + number % 2, prompt_logprobs=0)
        for number, prompt in enumerate(PROMPTS)
        for adapter in (None, "a", "b")
    ]


@pytest.mark.parametrize(("depth", "max_loras", "is_launched"), [(1, 2, False), (2, 1, False), (2, 2, True)])
def test_two_adapters_and_the_base_model_in_one_batch_answer_as_each_alone(
    base: Path, sources: tuple[AdapterSource, ...], depth: int, max_loras: int, is_launched: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """is_launched: this CPU is a device whose steps are launched and finished apart"""
    with RealEngine(base, **SPACE, lora_modules=sources, max_loras=2) as engine:
        for request in everything(engine):
            engine.run(request)
        alone = engine.answers()
    assert len({tuple(alone[f"{adapter} 0", 0].token_ids) for adapter in (None, "a", "b")}) == 3
    with RealEngine(base, kernels="reference") as engine:
        engine.run(greedy_request("plain", PROMPTS[0]))
        assert engine.answer("plain") == alone["None 0", 0].token_ids
    if is_launched:
        monkeypatch.setattr(Cpu, "make_launches", lambda self: HostLaunches())
        monkeypatch.setattr(reference, "BACKEND", replace(reference.BACKEND, choice=PlainChoice()))
    with RealEngine(base, **SPACE, lora_modules=sources, max_loras=max_loras, depth=depth) as engine:
        assert isinstance(engine.engine._steps.runner, DeviceRunner) is is_launched
        answers = engine.run(*everything(engine)).answers()
        assert {key: answer.token_ids for key, answer in answers.items()} == {key: answer.token_ids for key, answer in alone.items()}
        assert any(line.startswith(f"adapters: 2, {max_loras} in use at once") for line in engine.engine.info.decided)


def test_an_adapter_that_is_loaded_anew_answers_with_its_new_weights(base: Path, sources: tuple[AdapterSource, ...]) -> None:
    with RealEngine(base, **SPACE, lora_modules=sources, max_loras=1) as engine:
        engine.run(asked(engine, "before", "a", PROMPTS[0]))
        engine.submit(asked(engine, "runs", "a", PROMPTS[0], max_tokens=30))
        while not engine.tokens["runs", 0]:
            engine.engine.turn()
        save_adapter(Path(sources[0].path), base, 7)
        engine.engine.set_adapters(sources)
        engine.run(asked(engine, "after", "a", PROMPTS[0]), asked(engine, "other", "b", PROMPTS[0]))
        assert engine.cached["runs"] > 0
        assert engine.cached["after"] == 0
        assert engine.answer("runs")[:16] == engine.answer("before") != engine.answer("after")
        assert len(engine.answer("runs")) == 30


def test_a_listed_adapter_that_cannot_be_used_refuses_the_start(base: Path, tmp_path: Path) -> None:
    source = AdapterSource(name="large", path=str(save_adapter(tmp_path / "large", base, 0, rank=5)))
    with pytest.raises(CheckpointError, match="rank 5, more than max_lora_rank = 4"):
        RealEngine(base, **SPACE, lora_modules=(source,))


MAX_SEEDS = 12


@pytest.mark.parametrize("depth", [1, 2])
@pytest.mark.parametrize(
    "speculative",
    [SpeculativeConfig(method=NGRAM, prompt_lookup_min=1), SpeculativeConfig(method=DRAFT_MODEL, model=str(bundled_path(BUNDLED_DRAFT)))],
    ids=[NGRAM, DRAFT_MODEL],
)
def test_drafts_leave_every_bit_of_rows_with_and_without_adapters_as_it_is(
    speculative: SpeculativeConfig, depth: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    pytest.importorskip("numba")
    folder = bundled_path(DEFAULT_MODEL)
    assert folder is not None
    names = ("pirate", "hardware-shop")
    sources = tuple(AdapterSource(name=name, path=str(bundled_adapter(name))) for name in names)
    space: dict[str, Any] = {"deterministic": True, "enable_lora": True, "lora_modules": sources, "max_loras": 2}

    def requests(engine: RealEngine) -> list[EngineRequest]:
        params: list[dict[str, Any]] = [{"logprobs": 2}, {"temperature": 0.7}]
        return [
            asked(engine, f"{adapter} {number}", adapter, [40 + number, 50, 60] * 6, max_tokens=40, seed=number, **params[number])
            for number in range(2)
            for adapter in (None, *names)
        ]

    with RealEngine(folder, **space) as engine:
        whole = engine.run(*requests(engine)).answers()
    assert len({tuple(whole[f"{adapter} 0", 0].token_ids) for adapter in (None, *names)}) == 3
    seen = set[str]()
    for seed in range(MAX_SEEDS):  # what is drafted beside what depends on when the requests are added
        with RealEngine(folder, **space, depth=depth, speculative_config=speculative) as engine:
            decide_at_random(engine.engine.scheduler, seed)
            drafting, accepted = engine.engine.scheduler._drafting, Counter[str | None]()
            assert drafting is not None
            verify = drafting.verify

            def counted(row: StepRow, num_tokens: int, accepted: Counter[str | None] = accepted, verify: Any = verify) -> None:
                accepted[row.seq.request.adapter] += num_tokens - 1
                verify(row, num_tokens)

            monkeypatch.setattr(drafting, "verify", counted)
            assert engine.run(*requests(engine)).answers() == whole
            plans = engine.engine._steps.recent
            drafted = [{slot for slot, n in zip(plan.adapter_slots, plan.samples, strict=True) if n > 1} for plan in plans]
            counters = engine.engine.snapshot().counters
        seen |= {f"accepted {adapter}" for adapter in (None, *names) if accepted[adapter]}
        seen |= {"all three in one step"} if {0, 1, 2} in drafted else set()
        seen |= {"rejected"} if counters.accepted_tokens < counters.draft_tokens else set()
        if len(seen) == len(names) + 3:
            return
    pytest.fail(f"seen only: {sorted(seen)}")
