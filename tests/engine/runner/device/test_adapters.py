"""Tests that steps with adapters on a device give the plain runner's tokens, by captured passes of their own, and hold what they read."""

from __future__ import annotations

import gc
import weakref
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from device_kit import HostLaunches, make_device_runner
from runner_kit import ADAPTER_RANK, GREEDY, Planner, adapted, load_decoder, make_runner, random_adapter, row_tokens
from torch import Tensor

from headrace.core.plan import Plan, Result
from headrace.core.sampling import SamplingParams
from headrace.engine.runner.batch import Resident
from headrace.engine.runner.device.adapters import DevicePlaces
from headrace.engine.runner.device.runner import DeviceRunner, LaunchedStep
from headrace.engine.runner.model_runner import ModelRunner
from headrace.tensor.batch import PackedAdapter, StepAdapters
from headrace.tensor.kernels.choice import CHOICE_KINDS
from headrace.tensor.launches import EagerLaunches, Launches
from headrace.tensor.models.decoder import DecoderModel

pytestmark = pytest.mark.pure

SLOTS, MOST_TOKENS = 6, 40
PROMPTS = {0: [5, 6, 7, 8, 9], 1: [40, 3], 2: [20, 21, 22, 23, 24, 25, 26], 3: [60, 61, 62], 4: list(range(10, 60))}


@pytest.fixture(scope="module")
def decoder(tiny_folder: Path) -> DecoderModel:
    return load_decoder(tiny_folder, enable_lora=True)


class Places:
    """What the engine has loaded: changed between plans."""

    def __init__(self, *held: PackedAdapter | None) -> None:
        self.held: Resident = (None, *held)

    def __call__(self) -> Resident:
        return self.held


def make_device(decoder: DecoderModel, places: Places, launches: Launches | None = None) -> DeviceRunner:
    return make_device_runner(
        decoder, slots=SLOTS, most_tokens=MOST_TOKENS, launches=launches, places=DevicePlaces(places, ADAPTER_RANK)
    )  # fmt: skip


def steps() -> Iterator[tuple[int, Plan]]:
    """(what is in the places, plan): prompts beside rows that decode, of adapters and of the base model; a prompt that no captured size
    holds and one with log-probabilities; a place that another adapter takes while the step before is in flight."""
    planner, place_of = Planner(), {0: 1, 1: 0, 2: 2, 3: 1, 4: 2}
    reported = SamplingParams(temperature=0.0, seed=0, prompt_logprobs=1, logprobs=1)
    for slot in (0, 1):
        planner.start(slot, PROMPTS[slot])
    yield 0, adapted(planner, place_of, (0, 0, 5, 1), (1, 0, 2, 1))
    planner.start(2, PROMPTS[2], reported)
    planner.start(4, PROMPTS[4])
    yield 0, adapted(planner, place_of, (0, 5, 1, 1), (1, 2, 1, 1), (2, 0, 7, 1), (4, 0, 50, 1))
    yield 0, adapted(planner, place_of, (0, 6, 1, 1), (1, 3, 1, 1), (2, 7, 1, 1), (4, 50, 1, 1))
    planner.end(0)
    planner.start(3, PROMPTS[3])
    yield 1, adapted(planner, place_of, (1, 4, 1, 1), (2, 8, 1, 1), (3, 0, 3, 1))
    for n in range(4):
        yield 1, adapted(planner, place_of, (1, 5 + n, 1, 1), (2, 9 + n, 1, 1), (3, 3 + n, 1, 1))
    yield 1, adapted(planner, place_of, (1, 9, 1, 1))


def run(runner: ModelRunner | DeviceRunner, places: Places, held: list[Resident], depth: int) -> list[tuple[list[list[int]], list[int]]]:
    found, flying = list[Result](), list[Any]()
    for number, plan in steps():
        places.held = held[number]
        flying.append(runner.submit(plan))
        while len(flying) >= depth:
            found.append(flying.pop(0).result())
    found += [ticket.result() for ticket in flying]
    return [(row_tokens(result), list(result.prompt_logprobs.top_ids)) for result in found]


@pytest.mark.parametrize(("depth", "launches"), [(1, HostLaunches()), (2, HostLaunches()), (2, EagerLaunches(HostLaunches()))])
def test_mixed_adapters_give_the_plain_runners_tokens(decoder: DecoderModel, depth: int, launches: Launches) -> None:
    first, second, third = (random_adapter(decoder, seed) for seed in range(3))
    held: list[Resident] = [(None, first, second), (None, third, second)]
    places = Places(first, second)
    want = run(make_runner(decoder, resident=places), places, held, 1)
    assert run(make_device(decoder, places, launches), places, held, depth) == want
    others: list[Resident] = [(None, first, second), (None, first, second)]
    assert run(make_runner(decoder, resident=places), places, others, 1)[3:] != want[3:]


def test_passes_without_adapters_are_captured_apart_and_spared_their_products(
    decoder: DecoderModel, monkeypatch: pytest.MonkeyPatch
) -> None:
    places = Places(random_adapter(decoder, 1))
    runner, planner = make_device(decoder, places), Planner()
    launches = runner._launches
    assert isinstance(launches, HostLaunches)
    assert launches.captured == 2 * len((16, 32, 40)) + len((1, 2, 4, 6)) * (2 + len(CHOICE_KINDS))
    assert decoder.adapters is not None
    counts, plain = list[int](), decoder.adapters.kernels.apply

    def apply(y: Tensor, x: Tensor, linear: int, step: StepAdapters) -> Tensor:
        counts.append(len(x))
        return plain(y, x, linear, step)

    monkeypatch.setattr(decoder.adapters.kernels, "apply", apply)
    planner.start(0, PROMPTS[0])
    planner.start(1, PROMPTS[2])
    runner.submit(adapted(planner, {0: 0, 1: 0}, (0, 0, 5, 1))).result()
    runner.submit(adapted(planner, {0: 0, 1: 0}, (0, 5, 1, 1))).result()
    assert not counts
    runner.submit(adapted(planner, {0: 0, 1: 1}, (0, 6, 1, 1), (1, 0, 7, 1))).result()
    assert 16 in counts  # the prompt alone, padded
    counts.clear()
    runner.submit(adapted(planner, {0: 0, 1: 1}, (0, 7, 1, 1), (1, 7, 1, 1))).result()
    assert set(counts) == {2}


class Addressed:
    """A `DeviceAdapter` around the host's."""

    def __init__(self, address: int) -> None:
        self.address, self.num_bytes = address, 0


def test_a_launched_step_holds_its_adapters_and_has_written_their_addresses(decoder: DecoderModel, monkeypatch: pytest.MonkeyPatch) -> None:
    assert decoder.adapters is not None
    monkeypatch.setattr(decoder.adapters.kernels, "apply", lambda y, x, linear, step: y)
    held = Addressed(77 << 40)
    places = Places(None, held)
    runner, planner = make_device(decoder, places), Planner()
    planner.start(0, PROMPTS[0])
    ticket = runner.submit(adapted(planner, {0: 2}, (0, 0, 5, 1)))
    assert isinstance(ticket, LaunchedStep)
    addresses = runner._steps.adapters.of_decodes(1).addresses
    assert addresses is not None
    assert addresses.tolist() == [0, 0, 77 << 40]
    gone = weakref.ref(held)
    places.held = (None, None, None)
    del held
    gc.collect()
    assert gone() is not None
    ticket.result()
    del ticket
    gc.collect()
    assert gone() is None


def test_a_place_that_holds_no_adapter_is_refused_and_the_step_can_be_planned_again(decoder: DecoderModel) -> None:
    loaded = random_adapter(decoder, 1)
    places = Places(None, loaded)
    runner, planner = make_device(decoder, places), Planner()
    planner.start(0, PROMPTS[0], GREEDY)
    plan = adapted(planner, {0: 1}, (0, 0, 5, 1))
    with pytest.raises(ValueError, match="adapter_slots"):
        runner.submit(plan).result()
    places.held = (None, loaded, None)
    want = row_tokens(make_runner(decoder, resident=places).submit(plan).result())
    assert row_tokens(runner.submit(plan).result()) == want
