"""Provides the tiny Llama, once per session, and both kinds of runners over it."""

from __future__ import annotations

import random
from collections.abc import Iterator
from pathlib import Path

import pytest
import runner_kit
import torch
from device_kit import make_device_runner
from plain_masks import PlainMasks
from random_lives import Life, LifeEngine, language
from runner_kit import VOCAB, DenseLlama, MakeRunner, load_decoder, save_tiny_llama

from headrace.tensor.host.fresh_memory import poisoned
from headrace.tensor.models.decoder import DecoderModel


@pytest.fixture(scope="session")
def tiny_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_tiny_llama(tmp_path_factory.mktemp("tiny-llama"))


@pytest.fixture(scope="session")
def dense(tiny_folder: Path) -> DenseLlama:
    return DenseLlama(tiny_folder)


@pytest.fixture(scope="session")
def decoder(tiny_folder: Path) -> DecoderModel:
    return load_decoder(tiny_folder)


@pytest.fixture(params=["plain", "device"])
def make_runner(request: pytest.FixtureRequest) -> MakeRunner:
    """A runner that computes in `submit`, and one whose steps are launched and finished apart."""
    return runner_kit.make_runner if request.param == "plain" else make_device_runner


@pytest.fixture(scope="module")
def kept() -> dict[str, LifeEngine]:
    """What `whole` made for this module, in the surroundings of a test: on one thread."""
    return {}


@pytest.fixture
def whole(decoder: DecoderModel, lives: list[Life], kept: dict[str, LifeEngine]) -> LifeEngine:
    """The requests of the module's `lives` by the plain runner and without drafts, none cut off or preempted."""
    if not kept:
        runner = runner_kit.make_runner(decoder, masks=PlainMasks(language, VOCAB), num_blocks=400)
        engine = kept["whole"] = LifeEngine(decoder, runner, num_blocks=400)
        engine.run([Life(life.request, None, None) for life in lives], random.Random(0), preempts=False)
    return kept["whole"]


@pytest.fixture(autouse=True)
def one_thread() -> Iterator[None]:
    """Tiny tensors gain nothing from threads and lose much to waiting for them on a busy machine."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@pytest.fixture(autouse=True)
def poisoned_memory() -> Iterator[None]:
    """Memory that was made and not written holds NaN."""
    with poisoned():
        yield
