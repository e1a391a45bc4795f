"""Tests idle work of an engine: none of it runs beside a request, and all of it is done in the end. And its part of a machine."""

from __future__ import annotations

import json
import os
from collections import deque
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from engine_kit import DrivenEngine, request

from headrace.engine import utilisation
from headrace.engine.build import POLL_S, REST_S, build_engine, do_while_idle, part_of_machine
from headrace.engine.config import EngineConfig
from headrace.tensor.host import threads
from headrace.tensor.host.threads import CpuShare
from headrace.tensor.packed import store
from headrace.tensor.packed.store import write_tensors

pytestmark = pytest.mark.pure

PIECE_S = 0.02
"""What a piece takes here."""


class ScriptedEngine:
    """Busy at certain times of a clock that sleeps and pieces advance.

    busy   (first, last) moments between which a request is in the engine
    taken  when each piece began
    """

    def __init__(self, *busy: tuple[float, float], ends_at: float = 1e9) -> None:
        self.now, self.busy, self.ends_at = 0.0, busy, ends_at
        self.taken: list[float] = []

    @property
    def is_idle(self) -> bool:
        return not any(first <= self.now <= last for first, last in self.busy)

    def sleep(self, seconds: float) -> None:
        self.now += seconds

    def pieces(self, count: int) -> Iterator[None]:
        for _ in range(count):
            self.taken.append(self.now)
            self.now += PIECE_S
            yield

    def run(self, count: int) -> None:
        do_while_idle(self.pieces(count), is_idle=lambda: self.is_idle, is_over=lambda: self.now >= self.ends_at, sleep=self.sleep)


def test_pieces_are_taken_one_after_another_while_no_request_comes() -> None:
    engine = ScriptedEngine()
    engine.run(100)
    assert len(engine.taken) == 100
    assert engine.now == pytest.approx(REST_S + 100 * PIECE_S, abs=2 * POLL_S)


def test_no_piece_begins_beside_a_request_nor_soon_after_it() -> None:
    busy = ((0.0, 3.0), (4.2, 4.3), (4.6, 4.7), (5.5, 9.0))
    engine = ScriptedEngine(*busy)
    engine.run(200)
    assert len(engine.taken) == 200
    for first, last in busy:
        assert not [at for at in engine.taken if first <= at <= last + REST_S - POLL_S]
    assert [at for at in engine.taken if 3.0 < at < 4.2], "the time between two requests is used"


def test_a_client_that_sends_its_next_request_at_once_leaves_no_idle_time() -> None:
    engine = ScriptedEngine(*((at, at + 0.8) for at in range(100)), ends_at=100.0)
    engine.run(10)
    assert engine.taken == []


def test_an_engine_that_is_over_takes_no_further_piece() -> None:
    engine = ScriptedEngine(ends_at=1.0)
    engine.run(1000)
    assert 0 < len(engine.taken) <= (1.0 - REST_S) / PIECE_S + 1


def test_a_file_written_beside_requests_is_the_file_written_at_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The engine's own loop, with a request every second: no piece while one is in it, and every byte in the end."""
    monkeypatch.setattr(store, "PIECE_BYTES", 1000)
    linears = {f"{name}/words": torch.randint(0, 1 << 20, (50, 40), dtype=torch.int32) for name in "abc"}
    linears |= {"a/scales": torch.randn(77).bfloat16(), "empty": torch.zeros(0)}
    given = (linears, {"table:rows": torch.randn(300, 16).bfloat16()}, {"made for": "a test"})
    paths = [tmp_path / name for name in ("at once", "beside")]
    descriptors = [os.open(path, os.O_RDWR | os.O_CREAT) for path in paths]
    deque(write_tensors(descriptors[0], *given), maxlen=0)

    driven = DrivenEngine()
    arrivals = [(float(second), request(f"r{second}", [1, 2, 3], max_tokens=6)) for second in range(1, 9)]
    began = driven.clock.now
    num_taken = 0

    def pieces() -> Iterator[None]:
        nonlocal num_taken
        for _ in write_tensors(descriptors[1], *given):
            assert driven.engine.is_idle
            num_taken += 1
            sleep(0.1)
            yield

    def sleep(seconds: float) -> None:
        """Time in which the loop turns, and requests come."""
        driven.clock.now += seconds
        while arrivals and arrivals[0][0] <= driven.clock.now - began:
            driven.submit(arrivals.pop(0)[1])
        driven.turn()

    do_while_idle(pieces(), is_idle=lambda: driven.engine.is_idle, is_over=lambda: False, sleep=sleep)
    for descriptor in descriptors:
        os.close(descriptor)
    assert num_taken > 20
    assert len(driven.finish) >= 5, "requests were answered meanwhile"
    assert paths[1].read_bytes() == paths[0].read_bytes()


@pytest.mark.parametrize(
    ("share", "num_parts", "num_threads"),
    [
        (CpuShare(8, 4, None), 2, 2),
        (CpuShare(16, 8, 6.0), 2, 3),
        (CpuShare(16, 8, 6.0), 4, 1),
        (CpuShare(2, 1, None), 8, 1),
        (CpuShare(8, 4, 6.0), 1, None),
    ],
)
def test_ranks_have_the_threads_of_one_process_together(
    share: CpuShare, num_parts: int, num_threads: int | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A rank counted the CPUs of its part: two hardware threads of one core twice, and the whole quota."""
    monkeypatch.setattr(threads, "read_cpu_share", lambda: share)
    pair = EngineConfig(model="m", device="cpu", tensor_parallel_size=2).checked()
    found = part_of_machine(pair, num_parts)
    assert (found.num_threads, found.memory_fraction) == (num_threads, pair.memory_fraction / num_parts)
    assert part_of_machine(replace(pair, num_threads=5), num_parts).num_threads == 5
    assert part_of_machine(replace(pair, tensor_parallel_size=1), num_parts).num_threads is None, "it is bound to CPUs of its own"


MIXED = {"vocab_size": 64, "hidden_size": 96, "intermediate_size": 48, "num_hidden_layers": 3, "num_attention_heads": 12, "head_dim": 16,
         "num_key_value_heads": 4, "max_position_embeddings": 64,
         "architectures": ["MixtralForCausalLM"], "num_local_experts": 3}  # fmt: skip


def test_an_engine_reports_the_tokens_of_its_experts_without_those_of_its_warm_up(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(utilisation, "READ_EVERY_S", 0.0)
    (tmp_path / "config.json").write_text(json.dumps(MIXED))
    config = EngineConfig(model=str(tmp_path), device="cpu", load_format="dummy", kernels="reference", num_kv_blocks=8)
    engine = build_engine(config, lambda updates: None)
    with engine.closing:
        assert (engine.snapshot().counters.expert_tokens, engine.snapshot().counters.hottest_expert_tokens) == (0, {})
        engine.submit(request("a", [*range(10)], max_tokens=4))
        while engine.turn():
            pass
        found = engine.snapshot().counters
    assert found.expert_tokens == (10 + 3) * 2, "ten of the prompt and three that were generated chose two each; the last is not computed"
    hottest = {int(name.partition("/")[0]): tokens for name, tokens in found.hottest_expert_tokens.items()}
    assert [*hottest] == [0, 1, 2]
    assert all(total / 3 <= hottest[layer] < total for layer, total in ((0, 26), (1, 26), (2, 8)))
