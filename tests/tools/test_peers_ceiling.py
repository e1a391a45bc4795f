"""Tests the ceiling: which products are counted, that looking for the fastest kind is not timed, and that every kind computes the
product.
"""

from __future__ import annotations

import sys
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from torch import Tensor

from bench import precision_paths
from bench.peers import ceiling
from bench.peers.ceiling import Ceiling, Kind, OneDnnInt8, Pass, kinds_of, passes_of
from bench.peers.engines import WORKERS, Launch, launch_of, running
from bench.peers.rows import row_names
from bench.peers.run import rows_of
from bench.peers.shapes import Products
from headrace.tensor.kernels.cpu.launch_list import run_pending
from tests.lab.test_fake_clock import VirtualClock

pytestmark = pytest.mark.pure

TINY = Products(layer=((128, 64), (64, 128)), layers=3, head=(192, 64), kv_numbers=1)


class Counted:
    """Adds zeros, and remembers the rows it was called with; it takes its seconds of the clock."""

    def __init__(self, weight: Tensor, calls: list[int], seconds: float, clock: VirtualClock) -> None:
        self.in_features, self._calls, self._seconds, self._clock = weight.shape[1], calls, seconds, clock

    def __call__(self, x: Tensor) -> Tensor:
        run_pending()
        self._calls.append(len(x))
        self._clock.wait(self._seconds)
        return x


def kind(calls: list[int], seconds: float = 0.001, clock: VirtualClock | None = None) -> Kind:
    return Kind(lambda weight: Counted(weight, calls, seconds, clock or VirtualClock()), torch.float32)


def prompts(*lengths: int) -> list[list[int]]:
    return [[1] * length for length in lengths]


def test_passes_are_prompts_in_steps_and_then_a_row_per_request_that_goes_on() -> None:
    assert list(passes_of([512], [1])) == [Pass(512, 1)]
    assert list(passes_of([128, 128], [3, 2])) == [Pass(256, 2), Pass(2, 2), Pass(1, 1)]
    assert list(passes_of([2000, 100, 30], [1, 1, 1])) == [Pass(2048, 1), Pass(82, 2)]


def test_every_product_runs_once_per_layer_and_for_logits_alone_after_the_last_attention() -> None:
    calls: list[int] = []
    made = Ceiling(TINY, {"one": kind(calls)})
    made.prepare(prompts(5, 7), [3, 1])
    calls.clear()
    assert made(prompts(5, 7), [3, 1]) == 4
    assert calls == [12] * 5 + [2] * 2 + [1] * 7 + [1] * 7


def test_the_fastest_kind_is_chosen_before_the_clock_starts(monkeypatch: pytest.MonkeyPatch) -> None:
    clock = VirtualClock()
    monkeypatch.setattr(ceiling, "time", SimpleNamespace(perf_counter=clock))
    slow: list[int] = []
    fast: list[int] = []
    made = Ceiling(TINY, {"slow": kind(slow, 0.002, clock), "fast": kind(fast, 0.001, clock)})
    made.prepare(prompts(9), [4])
    assert {name for product in (*made.layer, made.head) for name in product.chosen.values()} == {"fast"}
    slow.clear()
    made(prompts(9), [4])
    assert slow == []


@pytest.mark.parametrize("cpu", precision_paths.CPUS)
def test_steps_of_few_rows_are_recorded_where_nothing_computes_outside_the_list(cpu: str) -> None:
    """Integers are multiplied in float32 rows on every CPU, as an engine does: casts around them would compute outside the list."""
    kinds = kinds_of("int8", precision_paths.CPUS[cpu])
    own = Ceiling(TINY, {"own": kinds["headrace-int8"]})
    own.prepare(prompts(*[40] * 3), [3, 2, 1])
    assert set(own._recorded) == {Pass(2, 2), Pass(1, 1)}
    assert own(prompts(*[40] * 3), [3, 2, 1]) == 6
    assert own._recorded[Pass(1, 1)].num_entries >= TINY.layers * len(TINY.layer) + 1
    outside = Ceiling(TINY, {"outside": kinds["onednn-int8"]})
    outside.prepare(prompts(5), [3])
    assert not outside._recorded


def test_rows_that_were_not_prepared_are_refused() -> None:
    made = Ceiling(TINY, {"one": kind([])})
    made.prepare(prompts(9), [1])
    with pytest.raises(KeyError):
        made(prompts(10), [1])


@pytest.mark.parametrize("precision", ["bf16", "int8", "int4"])
def test_every_kind_multiplies_by_the_weight(precision: str) -> None:
    torch.manual_seed(1)
    weight = torch.randn(192, 64).mul_(0.1).bfloat16()
    kinds = kinds_of(precision)
    assert ("headrace-" + precision in kinds) == (precision != "bf16")
    for name, each in kinds.items():
        x = each.rows(5, 64)
        numbers = x.float() - OneDnnInt8.ZERO if x.dtype == torch.uint8 else x.float()
        expected = numbers @ weight.float().T
        error = (each.make(weight)(x).float() - expected).norm() / expected.norm()
        assert error < (0.15 if name.endswith("int4") else 0.02), name


SLOW_TO_PREPARE = """
import protocol, types
now = 0.0
protocol.time = types.SimpleNamespace(perf_counter=lambda: now)
def passes(seconds, answer=None):
    global now
    now += seconds
    return answer
protocol.serve(
    lambda settings: lambda prompts, max_tokens: passes(2.0, sum(max_tokens)),
    lambda made, prompts, max_tokens: passes(500.0),
)
"""


@pytest.mark.process
def test_a_worker_prepares_outside_the_timed_part(tmp_path: Path) -> None:
    script = tmp_path / "slow_worker.py"
    script.write_text(SLOW_TO_PREPARE)
    with running(
        Launch(python=Path(sys.executable), script=str(script), settings={}, environment={"PYTHONPATH": str(WORKERS)}), tmp_path / "log"
    ) as worker:
        assert worker.ask(prompts(2), [1]) == 2.0


def test_every_precision_has_a_ceiling_for_every_question() -> None:
    assert rows_of("ceiling") == row_names()
    for precision in ("bf16", "int8", "int4"):
        assert launch_of("ceiling", Path("model"), precision, Path("envs"), 1).settings["precision"] == precision
