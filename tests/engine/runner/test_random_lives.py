"""Tests random requests over a device's runner, with steps in flight: each is answered as the plain runner answers it."""

from __future__ import annotations

import random

import numpy as np
import pytest
from device_kit import make_device_runner
from failpoint_kit import Injected, sites
from plain_masks import PlainMasks
from random_lives import Life, LifeEngine, RandomFaults, draw_lives, language
from runner_kit import VOCAB
from torch import Tensor

from headrace.core.update import FinishReason
from headrace.engine.runner.device.runner import DeviceRunner
from headrace.tensor.batch import ForwardBatch, KvCache
from headrace.tensor.models.decoder import DecoderModel

pytestmark = pytest.mark.pure

SEED, COUNT = 7, 200
FEW_BLOCKS = 40
FAULT_RATE = 0.04
POISON = 13
FAULTS = [name for name in sites() if name.startswith(("device.", "runner.apply", "runner.prompt_logprobs"))]


@pytest.fixture(scope="module")
def lives() -> list[Life]:
    return draw_lives(COUNT, SEED)


def check_forgotten(runner: DeviceRunner) -> None:
    """Nothing is left of a sequence: no step or token in flight, no entry that the device lacks, no edit."""
    assert not runner._flight
    assert not runner._num_in_flight.any()
    assert not runner._changes._blocks
    assert not runner._choice._edits
    assert not runner._choice._unsent


def check_tables(runner: DeviceRunner) -> None:
    """The device's block tables are the host's, as far as a slot's sequence reached."""
    on_device = runner._steps.slots.tables.numpy()
    for group, table in enumerate(runner._slots.tables):
        held = table != 0
        np.testing.assert_array_equal(np.where(held, on_device[group, :-1], 0), table)


@pytest.mark.parametrize("depth", [1, 2])
def test_random_lives_are_answered_as_by_the_plain_runner(decoder: DecoderModel, lives: list[Life], whole: LifeEngine, depth: int) -> None:
    runner = make_device_runner(decoder, num_blocks=FEW_BLOCKS, masks=PlainMasks(language, VOCAB))
    engine = LifeEngine(decoder, runner, depth=depth, num_blocks=FEW_BLOCKS)
    faults = RandomFaults(random.Random(SEED), FAULT_RATE)
    with faults.armed(FAULTS):
        engine.run(lives, random.Random(SEED + depth), faults)
    assert not engine.differences(lives, whole)
    engine.check_idle()
    check_tables(runner)
    check_forgotten(runner)
    assert sum(life.finish_at is None and life.cancel_at is None for life in lives) >= 80, "answers that nothing cuts off"
    wanted = ["cancelled", "ended early", "preempted", "prefix hits"] + ["cancelled in flight", "preempted in flight"] * (depth - 1)
    assert min(engine.counts[name] for name in wanted) >= 20, engine.counts
    assert faults.hits.keys() >= set(FAULTS) - {"runner.prompt_logprobs"}, faults.hits


class Poisoned:
    """The model, with NaN in the hidden state of every token of one id."""

    def __init__(self, decoder: DecoderModel) -> None:
        self.decoder, self.vocab_size, self.hidden_size = decoder, decoder.vocab_size, decoder.hidden_size
        self.activations = decoder.activations

    def forward(self, ids: Tensor, batch: ForwardBatch, kv: KvCache) -> Tensor:
        hidden = self.decoder.forward(ids, batch, kv)
        hidden[(ids if batch.selected is None else ids[batch.selected]) == POISON] = float("nan")
        return hidden

    def head(self, hidden: Tensor) -> Tensor:
        return self.decoder.logits(hidden)


@pytest.mark.parametrize("depth", [1, 2])
def test_a_row_of_nan_ends_its_sequence_alone(decoder: DecoderModel, lives: list[Life], whole: LifeEngine, depth: int) -> None:
    """A sequence fails at the token after the poisoned one; up to there, and for every other sequence, nothing changes."""
    some = [Life(life.request, None, None) for life in lives[:150] if life.request.params.prompt_logprobs is None]
    runner = make_device_runner(decoder, model=Poisoned(decoder), num_blocks=FEW_BLOCKS, masks=PlainMasks(language, VOCAB))
    engine = LifeEngine(decoder, runner, depth=depth, num_blocks=FEW_BLOCKS)
    engine.run(some, random.Random(SEED))
    num_failed = 0
    for life in some:
        for key in life.keys:
            inputs = [life.request.prompt_ids[-1], *whole.tokens[key][:-1]]
            fails = POISON in inputs
            num_failed += fails
            assert engine.tokens[key] == (whole.tokens[key][: inputs.index(POISON)] if fails else whole.tokens[key])
            assert (engine.finish[key] is FinishReason.ERROR) == fails
            assert (engine.errors.get(key) is not None) == fails
    assert num_failed >= 5
    engine.check_idle()
    check_forgotten(runner)


class Raising(Poisoned):
    """The model, which cannot compute a batch that holds one id."""

    def forward(self, ids: Tensor, batch: ForwardBatch, kv: KvCache) -> Tensor:
        if (ids == POISON).any():
            raise Injected("a row that cannot be computed")
        return self.decoder.forward(ids, batch, kv)


@pytest.mark.parametrize("depth", [1, 2])
def test_a_row_that_always_raises_ends_its_sequence_alone(decoder: DecoderModel, lives: list[Life], whole: LifeEngine, depth: int) -> None:
    """The loop repeats the rows of a step that raised in halves, until the sequence that makes it raise is alone."""
    some = [Life(life.request, None, None) for life in lives[:80]]
    runner = make_device_runner(decoder, model=Raising(decoder), num_blocks=FEW_BLOCKS, masks=PlainMasks(language, VOCAB))
    engine = LifeEngine(decoder, runner, depth=depth, num_blocks=FEW_BLOCKS)
    engine.run(some, random.Random(SEED))
    num_failed = 0
    for life in some:
        for key in life.keys:
            outputs = whole.tokens[key]
            is_sick, fails_at = POISON in life.request.prompt_ids, outputs[:-1].index(POISON) + 1 if POISON in outputs[:-1] else None
            expected = [] if is_sick else outputs[:fails_at]
            num_failed += is_sick or fails_at is not None
            assert engine.tokens[key] == expected
            assert (engine.finish[key] is FinishReason.ERROR) == (is_sick or fails_at is not None)
    assert 5 <= num_failed <= 60
    engine.check_idle()
    check_forgotten(runner)
