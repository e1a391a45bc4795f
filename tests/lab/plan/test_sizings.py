"""The sizings that most texts quote come out of shapes and devices, and change with them."""

from __future__ import annotations

from dataclasses import replace

import pytest

from headrace.lab.plan.catalogue import Catalogue, read_catalogue
from headrace.lab.plan.sizings import (
    fleet,
    known_sizings,
    kv_bytes,
    levers,
    mixed_fleet,
    resident,
    routing_saving,
    shape,
    standby_replicas,
    weights_bytes,
)

pytestmark = pytest.mark.pure


@pytest.fixture(scope="module")
def catalogue() -> Catalogue:
    return read_catalogue()


def with_memory(catalogue: Catalogue, name: str, memory_bytes: float) -> Catalogue:
    return replace(catalogue, devices={**catalogue.devices, name: replace(catalogue.device(name), memory_bytes=memory_bytes)})


def test_resident_tokens_and_sequences_of_70b_on_four_h100(catalogue: Catalogue) -> None:
    tokens, sequences = resident(catalogue, "llama-70b", "h100", 4, 2048)
    assert tokens == pytest.approx(560_000, rel=0.02)
    assert sequences == pytest.approx(270, rel=0.02)
    assert resident(with_memory(catalogue, "h100", 100e9), "llama-70b", "h100", 4, 2048)[0] > tokens


def test_a_thousand_users_at_thirty_tokens_take_eight_replicas_of_four_h100(catalogue: Catalogue) -> None:
    best = fleet(catalogue, "llama-70b", "h100", context=2048, tokens_per_s=30_000, user_tokens_per_s=30).best
    assert (best.replicas, best.layout.tp, best.layout.pp, best.num_devices) == (8, 4, 1, 32)
    half = replace(catalogue, devices={"h100": replace(catalogue.device("h100"), bytes_per_s=1675e9)})
    assert fleet(half, "llama-70b", "h100", context=2048, tokens_per_s=30_000, user_tokens_per_s=30).best.num_devices > 32


def test_two_hundred_thousand_tokens_per_second_take_eighty_and_thirty_a100(catalogue: Catalogue) -> None:
    large, small = mixed_fleet(catalogue)
    assert (large.best.num_devices, small.best.num_devices) == (80, 30)


@pytest.mark.parametrize(("name", "kib"), [("mistral-7b", 128), ("llama-70b", 320), ("llama-3-405b", 504), ("llama-2-7b", 512)])
def test_kv_bytes_of_one_token(catalogue: Catalogue, name: str, kib: int) -> None:
    assert kv_bytes(shape(catalogue, name), 1) == kib * 1024


def test_kv_bytes_of_long_contexts(catalogue: Catalogue) -> None:
    assert kv_bytes(shape(catalogue, "llama-70b"), 131_072) == 40 * 2**30
    assert kv_bytes(shape(catalogue, "llama-2-7b"), 4096) == 2 * 2**30


@pytest.mark.parametrize(
    ("name", "dtype", "gb"),
    [
        ("llama-70b", "fp16", 140),
        ("llama-70b", "int4", 35),
        ("llama-3-405b", "fp16", 810),
        ("llama-3-405b", "fp8", 405),
        ("mistral-7b", "fp16", 14),
    ],
)
def test_weights_in_gigabytes(catalogue: Catalogue, name: str, dtype: str, gb: float) -> None:
    assert weights_bytes(shape(catalogue, name), dtype) / 1e9 == pytest.approx(gb, rel=0.05)


def test_two_dollars_per_hour_at_a_thousand_tokens_per_second(catalogue: Catalogue) -> None:
    rows = {each.question: each.found for each in known_sizings(catalogue)}
    assert rows["1K tokens at $2 per hour and 1,000 tokens/s"] == "$0.00056"


def test_routing_saves_half_to_seventy_percent() -> None:
    assert routing_saving(0.6, 8) == pytest.approx(0.525)
    assert routing_saving(0.8, 8) == pytest.approx(0.7)
    assert routing_saving(0.0, 8) == 0


def test_the_bill_is_more_than_halved(catalogue: Catalogue) -> None:
    left = 1.0
    for lever in levers(catalogue):
        assert 0 < lever.factor < 1, lever.name
        left *= lever.factor
    assert left < 0.5


def test_standby_replicas_keep_the_last_request_of_a_spike_within_its_patience() -> None:
    for rate in (60, 75, 100, 250):
        for patience_s in (5, 30):
            standby = standby_replicas(requests_per_s=rate, replica_requests_per_s=10, running=6, load_s=90, patience_s=patience_s)
            served = 10 * (6 + standby)
            assert (rate - served) * 90 / served <= patience_s + 1e-9
            if standby:
                fewer = served - 10
                assert (rate - fewer) * 90 / fewer > patience_s
