"""Tests the GPU's kernels of adapters: each token's update against a sum per token in double precision.

As `test_equivalence.py`, these run on a GPU by themselves and without one in the process of `test_interpreter.py`.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import pytest
import torch
from torch import Tensor

pytest.importorskip("triton")

import triton

from headrace.tensor.batch import DeviceAdapter, PackedAdapter, StepAdapters
from headrace.tensor.kernels import LowRankUpdate
from headrace.tensor.kernels.gpu.adapters import TritonAdapters

Error = Callable[[Tensor, Tensor], float]
Linears = Sequence[Sequence[LowRankUpdate]]

IS_INTERPRETED = bool(triton.knobs.runtime.interpret)
DEVICE = "cpu" if IS_INTERPRETED else "cuda"
KERNELS = TritonAdapters(DEVICE)

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.pure if IS_INTERPRETED else pytest.mark.process,  # compiling starts programs
    pytest.mark.skipif(not IS_INTERPRETED and not torch.cuda.is_available(), reason="there is no GPU"),
    pytest.mark.filterwarnings("ignore:.* encountered in:RuntimeWarning"),  # the interpreter computes both sides of a choice
]

BOUNDS = {torch.float32: 3e-6, torch.float16: 2e-3, torch.bfloat16: 1.6e-2}
COMPUTED = [torch.float32, torch.float16, pytest.param(torch.bfloat16, marks=pytest.mark.skipif(IS_INTERPRETED, reason="no such products"))]
INPUTS, OUTPUTS, RANK = 300, 200, 40


@pytest.fixture(autouse=True)
def seeded() -> None:
    torch.manual_seed(0)


def update(rank: int, rows: int = OUTPUTS, first_row: int = 0, dtype: torch.dtype = torch.float32, inputs: int = INPUTS) -> LowRankUpdate:
    down, up = torch.randn(rank, inputs) / inputs**0.5, torch.randn(rows, rank) / rank**0.5
    return LowRankUpdate(down=down.to(dtype), up=up.to(dtype), scale=0.3 * rank, first_row=first_row)


def adapters() -> list[Linears]:
    """One linear in the middle of three; the updates of stacked ones meet within a tile of outputs."""
    other = [update(3)]
    return [
        [other, [update(8)], other],
        [[], [update(16, 90, 0), update(40, 30, 90), update(5, 80, 120)], []],
        [other, [], other],
        [other, [update(33, dtype=torch.bfloat16)], []],
        [[], [update(1, 40, 128, torch.bfloat16), update(16, 20, 10, torch.bfloat16)], other],
    ]


def step_of(slots: Sequence[int], resident: Sequence[PackedAdapter | None], selected: Sequence[int] | None = None) -> StepAdapters:
    def ints(values: Sequence[int], dtype: torch.dtype = torch.int32) -> Tensor:
        return torch.tensor(values, dtype=dtype, device=DEVICE)

    addresses = ints([each.address if isinstance(each, DeviceAdapter) else 0 for each in resident], torch.int64)
    return StepAdapters(ints(slots), tuple(resident), None if selected is None else ints(selected), addresses=addresses, max_rank=RANK)


def plain(y: Tensor, x: Tensor, linear: int, slots: Sequence[int], held: Sequence[Linears | None]) -> Tensor:
    out = y.double().cpu()
    for token, slot in enumerate(slots):
        adapter = held[slot]
        for each in () if adapter is None else adapter[linear]:
            rows = slice(each.first_row, each.first_row + len(each.up))
            out[token, rows] += each.scale * each.up.double() @ (each.down.double() @ x[token].double().cpu())
    return out


@pytest.mark.parametrize("dtype", COMPUTED)
@pytest.mark.parametrize("tokens", [1, 7, 40, 270])
def test_each_token_is_given_its_own_adapters_update(relative_error: Error, tokens: int, dtype: torch.dtype) -> None:
    """Ranks of one piece and of several, places without tokens, empty places, an adapter that leaves the linear alone."""
    found = adapters()
    held = [None, found[0], None, *found[1:4], None, found[4], None]
    resident = [None if each is None else KERNELS.pack(each) for each in held]
    places = [place for place, each in enumerate(held) if each is not None or place == 0]
    slots = [places[3]] + [places[token * token % 7 % len(places)] for token in range(1, tokens)]
    y, x = torch.randn(tokens, OUTPUTS).to(dtype).to(DEVICE), torch.randn(tokens, INPUTS).to(dtype).to(DEVICE)
    want = plain(y, x, 1, slots, held)
    got = KERNELS.apply(y.clone(), x, 1, step_of(slots, resident))
    assert got.dtype == dtype
    assert relative_error(got.cpu(), want) < BOUNDS[dtype]
    base = [token for token, slot in enumerate(slots) if slot in (0, 4)]
    assert torch.equal(got[base], y[base])


def test_the_selected_tokens_of_a_step_have_their_own_order(relative_error: Error) -> None:
    held: list[Linears | None] = [None, [[update(4)]], [[update(9)]]]
    step = step_of([2, 0, 1, 1, 2], [None if each is None else KERNELS.pack(each) for each in held], [1, 2])
    for slots in ([2, 0, 1, 1, 2], [1, 2], [2, 0, 1, 1, 2]):
        y, x = torch.randn(len(slots), OUTPUTS, device=DEVICE), torch.randn(len(slots), INPUTS, device=DEVICE)
        want = plain(y, x, 0, slots, held)
        assert relative_error(KERNELS.apply(y, x, 0, step).cpu(), want) < BOUNDS[torch.float32]
    empty = torch.zeros(0, OUTPUTS, device=DEVICE)
    assert KERNELS.apply(empty, torch.zeros(0, INPUTS, device=DEVICE), 0, step) is empty


def test_long_inputs_are_summed_in_parts(relative_error: Error) -> None:
    """Twenty adapters, as many rows and more."""
    held: list[Linears | None] = [None, *([[update(16, 32, dtype=torch.bfloat16, inputs=2100)]] for _ in range(20))]
    resident = [None if each is None else KERNELS.pack(each) for each in held]
    slots = [row % 21 for row in range(32)]
    y, x = torch.randn(32, 32, device=DEVICE), torch.randn(32, 2100, device=DEVICE)
    want = plain(y, x, 0, slots, held)
    assert relative_error(KERNELS.apply(y, x, 0, step_of(slots, resident)).cpu(), want) < BOUNDS[torch.float32]


def test_an_adapter_is_one_piece_of_memory_of_little_more_than_its_weights() -> None:
    packed = KERNELS.pack([[update(16, 512, inputs=512)], [], [update(20, 100, dtype=torch.bfloat16)]])
    weights = 4 * 16 * 1024 + 2 * 20 * (INPUTS + 100)
    assert packed.memory.numel() == packed.num_bytes
    assert packed.memory.data_ptr() == packed.address
    assert weights < packed.num_bytes < weights + 8 * (4 + 3 * 7) + 6 * 16
