"""Tests recorded steps against the layers called one by one, on a whole model: the same bits, whatever came before."""

from __future__ import annotations

import random
import sys
from dataclasses import replace
from functools import cache
from itertools import accumulate
from pathlib import Path

import pytest
import torch
from cpu_families import AVX2, AVX512_BF16
from tiny_models import save_tiny_model
from torch import Tensor

pytest.importorskip("numba")

from headrace.bundled import DEFAULT_MODEL, bundled_path
from headrace.tensor.backends import load_backend
from headrace.tensor.batch import ForwardBatch, GroupBatch, KvCache, PackedAdapter, StepAdapters, allocate_kv
from headrace.tensor.device import CPU
from headrace.tensor.kernels import LowRankUpdate
from headrace.tensor.kernels.cpu import backend as cpu
from headrace.tensor.models import LoadedModel, load_model
from headrace.tensor.models import steps as module

pytestmark = pytest.mark.pure

STRIPS = load_backend("numba", features=AVX2)
"""Products that can be recorded, also where this CPU's own choice would be oneDNN."""
BF16_STRIPS = load_backend("numba", features=AVX512_BF16)
BLOCK_SIZE, BLOCKS_PER_ROW, MOST_ROWS = 4, 400, 20


@cache
def _loaded(quantization: str, dtype: torch.dtype = torch.float32, *, enable_lora: bool = False, folder: Path | None = None) -> LoadedModel:
    """The bundled model, or random weights for the configuration in a folder."""
    load_format = "auto" if folder is None else "dummy"
    folder = folder or bundled_path(DEFAULT_MODEL)
    if folder is None:
        pytest.skip("no bundled model in this checkout")
    backend = STRIPS if dtype == torch.float32 else BF16_STRIPS
    return load_model(
        folder, backend=backend, dtype=dtype, device=CPU, load_format=load_format, seed=0, max_model_len=None,
        quantization=quantization, enable_lora=enable_lora,
    )  # fmt: skip


@cache
def _filling(num_slots: int, heads: int, dim: int) -> Tensor:
    return torch.randn(num_slots, heads, dim, generator=torch.Generator().manual_seed(1))


def _cache(loaded: LoadedModel, dtype: torch.dtype, num_blocks: int = 1 + MOST_ROWS * BLOCKS_PER_ROW) -> KvCache:
    model = loaded.model
    kv = allocate_kv(model.kv_shapes, model.group_of, (num_blocks,) * len(model.kv_groups), BLOCK_SIZE, dtype, CPU)
    filling = _filling(num_blocks * BLOCK_SIZE, *model.kv_shapes[0])
    for layer in kv.layers:
        STRIPS.kernels.scatter_kv(filling, filling, layer.values, torch.arange(len(filling)), kv_scales=layer.scales)
    return kv


def _batch(
    rows: list[int], contexts: list[int], blocks_per_row: int = BLOCKS_PER_ROW, *, counts: list[int] | None = None, num_groups: int = 1
) -> ForwardBatch:
    """The last tokens of each row (one, if no counts are given), which then has that context. All groups have the same tables."""
    counts = counts or [1] * len(rows)
    width = max(-(-context // BLOCK_SIZE) for context in contexts)
    table = torch.zeros((len(rows), width), dtype=torch.int32)
    positions: list[int] = []
    slots: list[int] = []
    for place, (row, context, count) in enumerate(zip(rows, contexts, counts, strict=True)):
        used = -(-context // BLOCK_SIZE)
        table[place, :used] = torch.arange(used, dtype=torch.int32) + 1 + row * blocks_per_row
        positions += range(context - count, context)
        slots += [(1 + row * blocks_per_row) * BLOCK_SIZE + position for position in range(context - count, context)]
    starts = torch.tensor([0, *accumulate(counts)], dtype=torch.int32)
    groups = tuple(GroupBatch(table.clone(), torch.tensor(slots)) for _ in range(num_groups))
    return ForwardBatch(torch.tensor(positions), starts, torch.tensor(contexts, dtype=torch.int32), max(counts), groups)


def _plain(loaded: LoadedModel, ids: Tensor, batch: ForwardBatch, kv: KvCache) -> Tensor:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(cpu, "FEW_TOKENS", 0)
        return loaded.model.forward(ids, batch, kv)


@torch.inference_mode()
@pytest.mark.parametrize(
    ("quantization", "dtype", "stored"),
    [
        ("none", torch.float32, torch.float32),
        ("none", torch.bfloat16, torch.bfloat16),
        ("int8", torch.float32, torch.int8),
        ("int4", torch.float32, torch.bfloat16),
    ],
)
def test_steps_have_the_bits_of_layers_called_one_by_one(quantization: str, dtype: torch.dtype, stored: torch.dtype) -> None:
    """Rows come and go, contexts grow past a table's room and become shared by workers; two caches are used in turn."""
    loaded, rng = _loaded(quantization, dtype), random.Random(0)
    caches = [_cache(loaded, stored), _cache(loaded, stored)]
    twins = [_cache(loaded, stored), _cache(loaded, stored)]
    results = []
    for number in range(30):
        rows = rng.sample(range(MOST_ROWS), rng.choice([1, 1, 2, 3, 5, 8, 19]))
        longest = rng.choice([5, 60, 300, 1500])
        batch = _batch(rows, [rng.randint(1, longest) for _ in rows])
        ids, which = torch.tensor([rng.randrange(4, loaded.vocab_size) for _ in rows]), number % 2
        got = loaded.model.forward(ids, batch, caches[which])
        assert torch.equal(got, _plain(loaded, ids, batch, twins[which]))
        results.append((got, got.clone()))
    assert all(torch.equal(kept, then) for kept, then in results), "a later step wrote into an earlier one's result"
    kept = loaded.model._steps._kept
    assert all(step.recording.is_whole for step in kept.values())
    assert 0 < sum(step.recording.kept_bytes for step in kept.values()) <= loaded.model.recorded_bytes


@torch.inference_mode()
@pytest.mark.parametrize(
    ("quantization", "dtype"), [("none", torch.float32), ("none", torch.bfloat16), ("int8", torch.float32), ("int4", torch.float32)]
)
def test_steps_of_as_many_rows_as_are_recorded_have_the_same_bits(quantization: str, dtype: torch.dtype) -> None:
    loaded, rng, blocks = _loaded(quantization, dtype), random.Random(1), 25
    kv, twin = (_cache(loaded, torch.bfloat16, 1 + cpu.FEW_TOKENS * blocks) for _ in range(2))
    for count in (cpu.FEW_TOKENS, 33, cpu.FEW_TOKENS, 20, 33):
        rows = rng.sample(range(cpu.FEW_TOKENS), count)
        batch = _batch(rows, [rng.randint(1, BLOCK_SIZE * blocks) for _ in rows], blocks)
        ids = torch.tensor([rng.randrange(4, loaded.vocab_size) for _ in rows])
        assert torch.equal(loaded.model.forward(ids, batch, kv), _plain(loaded, ids, batch, twin))
    assert {count for count, cache, _ in loaded.model._steps._kept if cache == id(kv)} == {20, 33, cpu.FEW_TOKENS}


def _ragged(rng: random.Random, blocks: int, num_groups: int) -> ForwardBatch:
    """Rows of a token and up to four drafts, at most as many as are recorded."""
    counts = [rng.randint(1, 5) for _ in range(rng.choice([1, 1, 2, 3, 8]))]
    while sum(counts) > module.MAX_RAGGED_TOKENS:
        counts.pop()
    longest = rng.choice([5, 60, BLOCK_SIZE * blocks])
    contexts = [rng.randint(count, longest) for count in counts]
    return _batch(rng.sample(range(8), len(counts)), contexts, blocks, counts=counts, num_groups=num_groups)


@torch.inference_mode()
@pytest.mark.parametrize(
    ("model", "quantization", "dtype", "stored"),
    [
        ("", "none", torch.float32, torch.float32),
        ("", "none", torch.bfloat16, torch.bfloat16),
        ("", "int8", torch.float32, torch.int8),
        ("gemma3", "none", torch.float32, torch.int8),
    ],
)
def test_steps_of_rows_with_drafts_have_the_bits_of_layers_called_one_by_one(
    model: str, quantization: str, dtype: torch.dtype, stored: torch.dtype, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Gemma has layers with and without a window."""
    loaded = _loaded(quantization, dtype, folder=save_tiny_model(model, tmp_path) if model else None)
    rng, blocks = random.Random(3), 300
    kv, twin = (_cache(loaded, stored, 1 + 8 * blocks) for _ in range(2))
    calls, num_steps = _count_calls(monkeypatch, loaded), 40
    for _ in range(num_steps):
        batch = _ragged(rng, blocks, len(kv.pools))
        ids = torch.tensor([rng.randrange(4, loaded.vocab_size) for _ in range(batch.num_tokens)])
        assert torch.equal(loaded.model.forward(ids, batch, kv), _plain(loaded, ids, batch, twin))
    assert len(calls) < 2 * num_steps - 5, "hardly a step was repeated"
    assert all(torch.equal(own, other) for own, other in zip(kv.pools, twin.pools, strict=True))


@torch.inference_mode()
def test_a_recorded_step_is_repeated_however_its_tokens_are_divided_among_rows(monkeypatch: pytest.MonkeyPatch) -> None:
    """The context of one row is shared by workers, those of eight rows are not."""
    loaded = _loaded("none")
    kv, twin, model = _cache(loaded, torch.float32), _cache(loaded, torch.float32), loaded.model
    calls = _count_calls(monkeypatch, loaded)
    ids = torch.arange(8) + 5
    for counts in ([1] * 8, [8], [3, 5], [1, 6, 1], [8], [2] * 4):
        batch = _batch(list(range(len(counts))), [1500 - 7 * count for count in counts], counts=counts)
        got = model.forward(ids, batch, kv)
        assert calls == [8]
        assert torch.equal(got, _plain(loaded, ids, batch, twin))
        calls[:] = [8]
    for _ in range(2):
        model.forward(torch.arange(33) + 5, _batch([0, 1, 2], [20, 20, 20], counts=[1, 16, 16]), kv)
    assert calls == [8, 33, 33]


def test_inputs_of_a_recorded_step_are_on_the_batchs_device() -> None:
    def on_device(*shape: int, dtype: torch.dtype = torch.int32) -> Tensor:
        return torch.empty(shape, dtype=dtype, device="meta")

    groups = (GroupBatch(on_device(2, 3), on_device(2, dtype=torch.int64)),)
    batch = ForwardBatch(on_device(2, dtype=torch.int64), on_device(3), on_device(2), 1, groups)
    branch, residual = (on_device(2, 8, dtype=torch.float32) for _ in range(2))
    inputs = module._Inputs.of(branch, residual, batch)
    own = inputs.batch
    made = [inputs.branch, inputs.residual, own.positions, own.row_starts, own.context_lens]
    made += [tensor for group in own.groups for tensor in (group.block_table, group.slot_mapping)]
    assert {tensor.device.type for tensor in made} == {"meta"}


def _adapter(loaded: LoadedModel, seed: int) -> PackedAdapter:
    """One of two thirds of the linears, with ranks that differ."""
    random_numbers = torch.Generator().manual_seed(seed)
    assert loaded.model.adapters is not None
    linears = []
    for number, linear in enumerate(loaded.model.adapters.linears):
        rank = 1 + (seed + number) % 9
        updates = [
            LowRankUpdate(
                down=torch.randn(rank, linear.in_features, generator=random_numbers) / 20,
                up=torch.randn(part.rows, rank, generator=random_numbers) / 20,
                scale=2.0,
                first_row=part.first_row,
            )
            for part in linear.parts_of_output
        ]
        linears.append(updates if (seed + number) % 3 else [])
    return loaded.model.adapters.kernels.pack(linears)


@torch.inference_mode()
@pytest.mark.parametrize("quantization", ["none", "int8"])
def test_steps_of_rows_with_drafts_and_adapters_have_the_bits_of_layers_called_one_by_one(quantization: str) -> None:
    loaded, rng = _loaded(quantization, enable_lora=True), random.Random(4)
    kv, twin = (_cache(loaded, torch.float32, 1 + 8 * 25) for _ in range(2))
    adapters = [_adapter(loaded, seed) for seed in range(6)]
    for _ in range(20):
        batch = _ragged(rng, 25, 1)
        counts = batch.row_starts.diff()
        slots = torch.tensor([rng.randrange(5) for _ in counts], dtype=torch.int32).repeat_interleave(counts)
        batch.adapters = StepAdapters(slots, (None, *rng.sample(adapters, 4)))
        ids = torch.tensor([rng.randrange(4, loaded.vocab_size) for _ in range(batch.num_tokens)])
        assert torch.equal(loaded.model.forward(ids, batch, kv), _plain(loaded, ids, batch, twin))


@torch.inference_mode()
@pytest.mark.parametrize("quantization", ["none", "int8"])
def test_recorded_steps_with_adapters_have_the_bits_of_layers_called_one_by_one(quantization: str) -> None:
    """Twenty adapters in a step, each row as alone. Places are given to other adapters between two replays, and steps without adapters
    come between.
    """
    loaded, rng = _loaded(quantization, enable_lora=True), random.Random(2)
    kv, twin = (_cache(loaded, torch.float32, 1 + 20 * 25) for _ in range(2))
    adapters, bare = [_adapter(loaded, seed) for seed in range(24)], _loaded(quantization)
    for number in range(20):
        rows = rng.sample(range(20), rng.choice([1, 6, 20]))
        batch = _batch(rows, [rng.randint(1, 99) for _ in rows], 25)
        ids = torch.tensor([rng.randrange(4, loaded.vocab_size) for _ in rows])
        if number % 4 == 3:
            assert torch.equal(loaded.model.forward(ids, batch, kv), bare.model.forward(ids, batch, twin))
            continue
        slots = torch.tensor(rng.sample(range(21), len(rows)), dtype=torch.int32)
        batch.adapters = StepAdapters(slots, (None, *rng.sample(adapters, 20)))
        got = loaded.model.forward(ids, batch, kv)
        assert torch.equal(got, _plain(loaded, ids, batch, twin))
        alone = [_alone(loaded, ids, batch, row, kv) for row in range(len(rows))]
        assert torch.equal(got, torch.cat(alone))
    steps = loaded.model._steps._kept.values()
    assert all(step.recording.is_whole for step in steps)
    assert all(step.inputs.batch.adapters is None or step.inputs.batch.adapters.resident == () for step in steps), "adapters are kept alive"


def _alone(loaded: LoadedModel, ids: Tensor, batch: ForwardBatch, row: int, kv: KvCache) -> Tensor:
    assert batch.adapters is not None
    slots, (group,) = batch.adapters.slots[row : row + 1], batch.groups
    one = ForwardBatch(
        batch.positions[row : row + 1],
        torch.tensor([0, 1], dtype=torch.int32),
        batch.context_lens[row : row + 1],
        1,
        (GroupBatch(group.block_table[row : row + 1].contiguous(), group.slot_mapping[row : row + 1]),),
        StepAdapters(slots, batch.adapters.resident),
    )
    return loaded.model.forward(ids[row : row + 1], one, kv)


def _count_calls(monkeypatch: pytest.MonkeyPatch, loaded: LoadedModel) -> list[int]:
    """Number of tokens of each step whose layers are called."""
    calls: list[int] = []
    layers = loaded.model._steps._layers

    def counted(branch: Tensor, residual: Tensor, batch: ForwardBatch, kv: KvCache) -> tuple[Tensor, ...]:
        calls.append(batch.num_tokens)
        return layers(branch, residual, batch, kv)

    monkeypatch.setattr(loaded.model._steps, "_layers", counted)
    return calls


@torch.inference_mode()
def test_a_step_like_the_last_is_repeated_and_a_long_one_is_not(monkeypatch: pytest.MonkeyPatch) -> None:
    loaded = _loaded("none")
    kv, model = _cache(loaded, torch.float32), loaded.model
    calls = _count_calls(monkeypatch, loaded)
    for context in range(20, 40):
        model.forward(torch.tensor([5, 6]), _batch([0, 1], [context, 2 * context]), kv)
    assert len(calls) == 1
    monkeypatch.setattr(cpu, "FEW_TOKENS", 8)
    for _ in range(2):
        model.forward(torch.arange(9) + 5, _batch(list(range(9)), [20] * 9), kv)
    assert calls == [2, 9, 9]


@torch.inference_mode()
def test_as_many_shapes_are_kept_as_their_memory_allows(monkeypatch: pytest.MonkeyPatch) -> None:
    loaded = _loaded("none")
    kv, steps = _cache(loaded, torch.float32), module.RecordedSteps(STRIPS.executor, loaded.model._layers)
    monkeypatch.setattr(loaded.model, "_steps", steps)

    def run(count: int) -> None:
        loaded.model.forward(torch.arange(count) + 5, _batch(list(range(count)), [20] * count), kv)

    for count in range(1, 13):
        run(count)
    assert [key[0] for key in steps._kept] == list(range(1, 13))
    largest = max(step.recording.kept_bytes for step in steps._kept.values())
    monkeypatch.setattr(steps._executor, "max_recorded_bytes", largest, raising=False)
    run(1)
    run(11)
    held = [step.recording.kept_bytes for step in steps._kept.values()]
    assert sum(held) <= steps.most_bytes - largest
    assert list(steps._kept)[-1][0] == 11
    assert len(held) > 4
    monkeypatch.setattr(module, "MAX_SHAPES", 3)
    run(2)
    assert [key[0] for key in steps._kept][-2:] == [11, 2]
    assert len(steps._kept) == 3


@torch.inference_mode()
def test_what_cannot_be_recorded_is_not_tried_again(monkeypatch: pytest.MonkeyPatch) -> None:
    from headrace.tensor.kernels.cpu import launch_list

    loaded = _loaded("none")
    kv, steps = _cache(loaded, torch.float32), module.RecordedSteps(STRIPS.executor, loaded.model._layers)
    monkeypatch.setattr(loaded.model, "_steps", steps)
    monkeypatch.setattr(launch_list, "MAX_RESULT_BYTES", 1000)
    batch, ids = _batch([3], [50]), torch.tensor([7])
    first, second = loaded.model.forward(ids, batch, kv), loaded.model.forward(ids, batch, kv)
    assert torch.equal(first, second)
    assert steps._most_tokens == {False: 0, True: sys.maxsize}
    assert not steps._kept


@torch.inference_mode()
def test_a_step_of_which_only_some_tokens_are_wanted_is_not_repeated() -> None:
    loaded = _loaded("none")
    kv, batch = _cache(loaded, torch.float32), _batch([0, 1, 2], [7, 9, 3])
    ids = torch.tensor([5, 6, 7])
    every = loaded.model.forward(ids, batch, kv)
    some = loaded.model.forward(ids, replace(batch, selected=torch.tensor([0, 2])), kv)
    assert torch.equal(some, every[[0, 2]])
