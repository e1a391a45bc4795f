"""Tests many adapters over few places with clients that leave, an engine that is killed, and an adapter that is loaded again: a small
storm of `bench/storms/adapters.py`, over the fake runner, which checks that no KV of other weights is read.
"""

from __future__ import annotations

from pathlib import Path

import pytest

from bench.storms.adapters import Churn
from headrace.core.errors import Unavailable
from headrace.engine.config import EngineConfig
from headrace.engine.loop import Engine, Outbox
from headrace.lab.fake_adapters import save_fake_adapter
from headrace.lab.fake_runner import FakeOptions, fake_answer, fake_engine

pytestmark = pytest.mark.socket

OPTIONS = FakeOptions(block_size=4, num_blocks=65, max_model_len=128)
NUM_BYTES = 1000


def build(config: EngineConfig, outbox: Outbox) -> Engine:
    return fake_engine(outbox, OPTIONS, config)


def save(folder: Path, seed: int) -> Path:
    return save_fake_adapter(folder, bytes([seed % 256]) * NUM_BYTES)


@pytest.mark.parametrize("seed", range(2))
def test_every_answer_is_that_of_its_adapters_weights(tmp_path: Path, seed: int) -> None:
    churn = Churn(tmp_path, num_adapters=24, num_places=4, num_requests=300, seed=seed, build=build, save=save)
    churn.run()
    assert churn.different() == []
    assert churn.peak_bytes == 4 * NUM_BYTES, "no more adapters on the host than places"
    assert len(churn.ended_early) > 10
    assert churn.num_reloads == 2
    replaced = {request.adapter_digest for request in churn.requests.values() if request.adapter == "adapter-0"}
    assert len(replaced) == 3
    assert 1 <= len(churn.refused) < 20
    for name, error in churn.refused.items():
        assert isinstance(error, Unavailable)
        assert churn.requests[name].adapter == "adapter-0", error
    for name in churn.requests.keys() - churn.refused.keys() - churn.ended_early:
        assert churn.token_ids[name] == fake_answer(churn.requests[name], 0, 12, OPTIONS)
