"""Tests that an engine is built around a device's runner where the device launches steps, and that it answers as any other engine."""

from __future__ import annotations

import logging
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest
from device_kit import HostLaunches
from grammar_kit import vetting_here
from plain_choice import PlainChoice
from real_engine import RealEngine, greedy_request
from tiny_models import save_tiny_model

from headrace.bundled import bundled_path
from headrace.core.grammar import Grammar
from headrace.engine.runner.device.runner import DeviceRunner
from headrace.engine.runner.model_runner import ModelRunner
from headrace.engine.runner.warmup import prompt_lengths
from headrace.tensor.device import Cpu
from headrace.tensor.kernels import reference

pytestmark = pytest.mark.socket

REQUESTS = [
    greedy_request("greedy", range(5, 40)),
    greedy_request("sampled", range(30, 60), temperature=0.9, top_p=0.9, seed=3, n=2, presence_penalty=0.4),
    greedy_request("choice", range(9, 14), grammar=Grammar.choice(("yes", "no", "perhaps")), ignore_eos=False),
    greedy_request("reported", range(5, 33), logprobs=3, prompt_logprobs=1),
]


@pytest.fixture(autouse=True)
def vetted_here() -> Iterator[None]:
    with vetting_here():
        yield


@pytest.fixture
def launching(monkeypatch: pytest.MonkeyPatch) -> None:
    """This CPU as a device whose steps are launched and finished apart."""
    monkeypatch.setattr(Cpu, "make_launches", lambda self: HostLaunches())
    monkeypatch.setattr(reference, "BACKEND", replace(reference.BACKEND, choice=PlainChoice()))


def engine(**config: object) -> RealEngine:
    folder = bundled_path("headrace-tiny")
    if folder is None:
        pytest.skip("the bundled model is not there")
    return RealEngine(folder, kernels="reference", max_model_len=120, **config)


@pytest.mark.usefixtures("launching")
@pytest.mark.parametrize(("depth", "enforce_eager"), [(1, False), (2, False), (2, True)])
def test_an_engine_over_launched_steps_answers_as_the_plain_one(
    depth: int, enforce_eager: bool, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    caplog.set_level(logging.INFO, "headrace")
    launches = HostLaunches()
    monkeypatch.setattr(Cpu, "make_launches", lambda self: launches)
    with engine(depth=depth, enforce_eager=enforce_eager) as launched:
        assert isinstance(launched.engine._steps.runner, DeviceRunner)
        launched.run(*REQUESTS)
    assert "prepared 55 parts of steps, of 8 rows and 64 prompt tokens at most" in caplog.text
    assert launches.captured == (0 if enforce_eager else 55)
    monkeypatch.setattr(Cpu, "make_launches", lambda self: None)
    with engine() as plain:
        assert isinstance(plain.engine._steps.runner, ModelRunner)
        plain.run(*REQUESTS)
    assert launched.tokens == plain.tokens
    assert launched.finish == plain.finish
    assert [entry.top_ids for entry in launched.prompt_logprobs["reported", 0]] == [
        entry.top_ids for entry in plain.prompt_logprobs["reported", 0]
    ]


@pytest.mark.usefixtures("launching")
@pytest.mark.parametrize("name", ["gemma3", "qwen3-moe", "mixtral"])
def test_windows_several_caches_and_mixtures_are_replayed_padded(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Prompts of many lengths, in chunks and beside rows that decode: padding tokens and rows change nothing."""
    folder = save_tiny_model(name, tmp_path)
    requests = [greedy_request(f"{n}", range(3 + n, 3 + n + 11 * n % 90 + 1), max_tokens=5 + n) for n in range(14)]
    requests.append(greedy_request("reported", range(7, 60), prompt_logprobs=1))
    options = {"load_format": "dummy", "kernels": "reference", "max_model_len": 120, "num_kv_blocks": 150}
    with RealEngine(folder, depth=2, **options) as launched:
        launched.run(*requests)
    monkeypatch.setattr(Cpu, "make_launches", lambda self: None)
    with RealEngine(folder, **options) as plain:
        plain.run(*requests)
    assert launched.tokens == plain.tokens
    assert [entry.token_id for entry in launched.prompt_logprobs["reported", 0]] == list(range(8, 60))


def test_kernels_that_do_not_choose_tokens_have_the_plain_runner(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Cpu, "make_launches", lambda self: HostLaunches())
    with engine() as served:
        assert isinstance(served.engine._steps.runner, ModelRunner)


@pytest.mark.parametrize(("most", "lengths"), [(0, []), (3, [3]), (4, [4]), (5, [4, 5]), (64, [4, 8, 16, 32, 64])])
def test_warm_up_computes_prompts_of_powers_of_two(most: int, lengths: list[int]) -> None:
    assert prompt_lengths(most) == lengths
