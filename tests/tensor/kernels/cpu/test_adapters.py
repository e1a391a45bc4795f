"""Tests the kernels of adapters: equal to float64 up to float32 rounding, and a token's bits the same in every step and in every list."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import pytest
import torch
from torch import Tensor
from torch.nn import functional as F

pytest.importorskip("numba")

from headrace.tensor.batch import PackedAdapter, StepAdapters
from headrace.tensor.kernels import LowRankUpdate
from headrace.tensor.kernels.cpu import launch_list
from headrace.tensor.kernels.cpu.adapters import ADAPTERS
from headrace.tensor.kernels.cpu.backend import EXECUTOR, KERNELS
from headrace.tensor.kernels.cpu.jit.launch import CALLER, set_thread_limit
from headrace.tensor.kernels.cpu.linear import StripLinear

pytestmark = pytest.mark.pure

Error = Callable[[Tensor, Tensor], float]
Updates = list[list[LowRankUpdate]]


def _update(inputs: int, rows: int, rank: int, dtype: torch.dtype = torch.float32, first_row: int = 0, scale: float = 0.7) -> LowRankUpdate:
    down, up = torch.randn(rank, inputs) / inputs**0.5, torch.randn(rows, rank) / rank**0.5
    return LowRankUpdate(down=down.to(dtype), up=up.to(dtype), scale=scale, first_row=first_row)


def _padded_rows(y: Tensor) -> Tensor:
    """The same, as a linear returns it: a view of wider rows."""
    return F.pad(y, (0, 7))[:, : y.shape[1]]


def _expected(y: Tensor, x: Tensor, adapters: Sequence[Updates], linear: int, slots: Tensor) -> Tensor:
    """By float64. Slot s is adapter s - 1."""
    want = y.double()
    for token, slot in enumerate(slots.tolist()):
        for each in adapters[slot - 1][linear] if slot else ():
            added = each.scale * (each.up.double() @ (each.down.double() @ x[token].double()))
            want[token, each.first_row : each.first_row + len(added)] += added
    return want


def _step(slots: Tensor, adapters: Sequence[Updates]) -> StepAdapters:
    return StepAdapters(slots.int(), (None, *(ADAPTERS.pack(each) for each in adapters)))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(("inputs", "outputs"), [(1, 3), (32, 64), (70, 37), (96, 700)])
@pytest.mark.parametrize("ranks", [(1,), (8, 16), (13, 64, 1), (2, 300)])
def test_updates_equal_float64_products(
    relative_error: Error, dtype: torch.dtype, inputs: int, outputs: int, ranks: tuple[int, ...]
) -> None:
    """One adapter per rank, and tokens of the base model between theirs."""
    adapters: list[Updates] = [[[_update(inputs, outputs, rank, dtype)]] for rank in ranks]
    x, y = torch.randn(31, inputs), _padded_rows(torch.randn(31, outputs))
    slots = torch.randint(0, len(ranks) + 1, (31,))
    want, before = _expected(y, x, adapters, 0, slots), y.clone()
    got = ADAPTERS.apply(y, x, 0, _step(slots, adapters))
    assert relative_error(got, want) < 1e-6
    assert torch.equal(got[slots == 0], before[slots == 0])


def test_updates_of_parts_of_a_linear_change_only_their_rows(relative_error: Error) -> None:
    """As of stacked query, key and value: other ranks, scales and dtypes, and rows that fill no strip, whose neighbours are left alone."""
    first = [_update(96, 50, 16, torch.bfloat16), _update(96, 21, 8, first_row=50, scale=2.0), _update(96, 19, 5, first_row=80)]
    adapters: list[Updates] = [[[], first], [[], [_update(96, 21, 64, torch.bfloat16, first_row=50)]], [[], []]]
    x, y, slots = torch.randn(40, 96), _padded_rows(torch.randn(40, 99)), torch.arange(40) % 4
    want, before = _expected(y, x, adapters, 1, slots), y.clone()
    got = ADAPTERS.apply(y, x, 1, _step(slots, adapters))
    assert relative_error(got, want) < 1e-6
    assert torch.equal(got[:, 71:80], before[:, 71:80])
    assert torch.equal(got[slots == 2][:, :50], before[slots == 2][:, :50])
    assert torch.equal(got[slots % 4 == 3], before[slots % 4 == 3])


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_token_has_the_same_bits_in_every_step(dtype: torch.dtype) -> None:
    """In panels of every size, with every number of workers, whatever its neighbours ask for and in whichever place its adapter is."""
    own, other = ([[_update(150, 333, rank, dtype)]] for rank in (13, 40))
    x, y = torch.randn(80, 150), torch.randn(80, 333)
    packed, wider = ADAPTERS.pack(own), ADAPTERS.pack(other)
    alone = torch.cat([ADAPTERS.apply(y[t : t + 1].clone(), x[t : t + 1], 0, _place(torch.ones(1), (packed,))) for t in range(80)])
    for threads in (1, 10**6):
        set_thread_limit(threads)
        for count in (*range(1, 27), 80):
            assert torch.equal(ADAPTERS.apply(y[:count].clone(), x[:count], 0, _place(torch.ones(count), (packed,))), alone[:count]), count
        mixed = torch.tensor([2, 0, 2, 1, 2, 2, 0, 1]).repeat(10)
        got = ADAPTERS.apply(y.clone(), x, 0, _place(mixed, (wider, packed)))
        assert torch.equal(got[mixed == 2], alone[mixed == 2])


def _place(slots: Tensor, adapters: tuple[PackedAdapter | None, ...]) -> StepAdapters:
    return StepAdapters(slots.int(), (None, *adapters))


def test_rows_of_bfloat16_are_rounded_once(relative_error: Error) -> None:
    adapters: list[Updates] = [[[_update(64, 50, 16, torch.bfloat16)]]]
    x, y = torch.randn(9, 64).bfloat16(), torch.randn(9, 50).bfloat16()
    step = _step(torch.tensor([0, 1, 1, 0, 1, 1, 1, 1, 1]), adapters)
    with launch_list.deferred_launches():
        got = ADAPTERS.apply(y.clone(), x, 0, step)
    assert got.dtype == torch.bfloat16
    assert torch.equal(got, ADAPTERS.apply(y.float(), x.float(), 0, step).bfloat16())
    assert relative_error(got, _expected(y, x, adapters, 0, step.slots)) < 1 / 256


def test_only_the_selected_tokens_may_be_computed() -> None:
    adapters: list[Updates] = [[[_update(32, 40, 8)]], [[_update(32, 40, 16)]]]
    x, y, slots, selected = torch.randn(12, 32), torch.randn(12, 40), torch.arange(12) % 3, torch.tensor([1, 2, 3, 11])
    step = _step(slots, adapters)
    whole = ADAPTERS.apply(y.clone(), x, 0, step)
    step.selected_slots = step.slots[selected]
    assert torch.equal(ADAPTERS.apply(y[selected], x[selected], 0, step), whole[selected])


def test_what_is_packed_is_a_copy() -> None:
    updates: Updates = [[_update(32, 40, 8)]]
    x, y, packed = torch.randn(2, 32), torch.randn(2, 40), ADAPTERS.pack(updates)
    before = ADAPTERS.apply(y.clone(), x, 0, _place(torch.ones(2), (packed,)))
    updates[0][0].down.zero_()
    updates[0][0].up.zero_()
    assert torch.equal(ADAPTERS.apply(y.clone(), x, 0, _place(torch.ones(2), (packed,))), before)
    assert packed.num_bytes >= 4 * 8 * (32 + 40)


def test_a_slot_without_an_adapter_is_our_own_error() -> None:
    packed = ADAPTERS.pack([[_update(32, 40, 8)]])
    for slots, adapters in (([2], (packed,)), ([1], (None, packed)), ([-1], (packed,))):
        with pytest.raises(AssertionError, match="holds no adapter"):
            ADAPTERS.apply(torch.zeros(1, 40), torch.zeros(1, 32), 0, _place(torch.tensor(slots), adapters))


# --- launch lists ---


@dataclass(slots=True)
class _Layers:
    """Three layers of two linears each, the second of which needs the first one's update."""

    linears: list[StripLinear]

    def run(self, x: Tensor, step: StepAdapters) -> Tensor:
        norm = torch.ones(64)
        for number in range(0, len(self.linears), 2):
            EXECUTOR.next_layer()
            for linear in (number, number + 1):
                x = ADAPTERS.apply(self.linears[linear](x), x, linear, step)
            x = KERNELS.rms_norm(x, norm, 1e-5)
        return x


def _layers() -> _Layers:
    return _Layers([StripLinear.pack(torch.randn(shape) * 0.1, None) for _ in range(3) for shape in ((96, 64), (64, 96))])


def _adapter(rank: int, changed: Sequence[int] = range(6), dtype: torch.dtype = torch.bfloat16) -> PackedAdapter:
    return ADAPTERS.pack([[_update(*((64, 96), (96, 64))[n % 2], rank, dtype)] if n in changed else [] for n in range(6)])


def _at_once(layers: _Layers, x: Tensor, step: StepAdapters) -> Tensor:
    assert CALLER.pending is None
    return layers.run(x, step)


def test_deferred_and_replayed_steps_have_the_same_bits() -> None:
    """Every replay has other tokens, and other adapters in its places: of more ranks, of other linears, of none."""
    layers, x = _layers(), torch.randn(12, 64)
    few, many, some, none = _adapter(8), _adapter(40, dtype=torch.float32), _adapter(16, changed=(1, 4)), _adapter(4, changed=())
    step = _place(torch.arange(12) % 3, (few, some))
    with launch_list.deferred_launches():
        got = layers.run(x, step)
    assert torch.equal(got, _at_once(layers, x, step))
    with launch_list.recording() as recorded:
        got = layers.run(x, step)
    assert recorded.is_whole
    assert torch.equal(got, _at_once(layers, x, step))
    for seed, places in enumerate(((few, some), (many, few), (none, some), (some, none, many, few), (none, none), (few, None, many))):
        held = torch.tensor([0, *(place for place, each in enumerate(places, 1) if each is not None)])
        generator = torch.Generator().manual_seed(seed)
        step.slots.copy_(held[torch.randint(len(held), (12,), generator=generator)])
        step.resident = (None, *places)
        x.copy_(torch.randn(12, 64, generator=generator))
        got.fill_(7.0)
        assert recorded.replay()
        assert torch.equal(got, _at_once(layers, x, _place(step.slots.clone(), places))), places


def test_linears_that_no_token_of_a_step_changes_run_nothing_more() -> None:
    layers, x, step = _layers(), torch.randn(5, 64), _place(torch.tensor([0, 1, 0, 1, 1]), (_adapter(8, changed=(1, 2)), _adapter(8)))

    def workers() -> list[int]:
        """Of the pending kernels."""
        pending = CALLER.pending
        assert isinstance(pending, launch_list.LaunchList)
        return pending.entries[launch_list.WORKERS :: launch_list.ENTRY_WORDS]

    y = torch.randn(5, 96)
    assert ADAPTERS.apply(y, x, 0, step) is y
    with launch_list.deferred_launches():
        layers.run(x, step)
        with_updates = workers()
        launch_list.run_pending()
        layers.run(x, _place(torch.zeros(5), (None,)))
        without = workers()
    assert len(with_updates) == len(without) + 2 * 2
    with launch_list.recording():
        layers.run(x, step)
        assert sum(count > 0 for count in workers()) == len(with_updates)
