"""Tests every Triton kernel against the reference.

On a GPU these tests run by themselves (`make test-gpu`). Without one, `test_interpreter.py` runs all of them in one process under Triton's
interpreter, which knows neither bfloat16 products nor FP8 products: what needs those is skipped there. Memory that a kernel should have
written holds NaN (tests/tensor/conftest.py).
"""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

pytest.importorskip("triton")

import triton

from headrace.tensor.batch import ForwardBatch, GroupBatch, allocate_kv
from headrace.tensor.checkpoint.config import read_config
from headrace.tensor.checkpoint.random_weights import RandomWeights
from headrace.tensor.device import DEVICES
from headrace.tensor.kernels import Backend
from headrace.tensor.kernels.gpu.backend import TritonKernels
from headrace.tensor.kernels.gpu.linears import PaddedLinear, StoredLinear, TritonPacking
from headrace.tensor.kernels.gpu.tuning import Tuning, read_tuning
from headrace.tensor.kernels.reference import BACKEND
from headrace.tensor.kernels.reference import KERNELS as REFERENCE
from headrace.tensor.kernels.reference import PACKING as PLAIN
from headrace.tensor.kernels.rounding import Precision, RoundedWeight
from headrace.tensor.layers.weights import WeightReader
from headrace.tensor.models import ARCHITECTURES
from headrace.tensor.models.decoder import DecoderModel

Error = Callable[[Tensor, Tensor], float]
Make = Callable[..., Any]

IS_INTERPRETED = bool(triton.knobs.runtime.interpret)
DEVICE = "cpu" if IS_INTERPRETED else "cuda"
FP8 = torch.float8_e4m3fn

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.pure if IS_INTERPRETED else pytest.mark.process,  # compiling starts programs
    pytest.mark.skipif(not IS_INTERPRETED and not torch.cuda.is_available(), reason="there is no GPU"),
    pytest.mark.filterwarnings("ignore:.* encountered in:RuntimeWarning"),  # the interpreter computes both sides of a choice
]
needs_device = pytest.mark.skipif(IS_INTERPRETED, reason="the interpreter has no such products")

BOUNDS = {torch.float32: 2e-6, torch.float16: 2e-3, torch.bfloat16: 1.6e-2}
"""Errors relative to the largest value: sums in another order; one rounding of the output, and of weights before they are added up."""
COMPUTED = [torch.float32, torch.float16, pytest.param(torch.bfloat16, marks=needs_device)]


@pytest.fixture(scope="module")
def tuning() -> Tuning:
    """The table in use; for the interpreter, which runs programs one after another, contexts are split into fewer shares."""
    table = read_tuning()
    if not IS_INTERPRETED:
        return table
    narrow, wide = (replace(each, programs=24) for each in (table.narrow_decode, table.wide_decode))
    return replace(table, narrow_decode=narrow, wide_decode=wide)


@pytest.fixture(scope="module")
def kernels(tuning: Tuning) -> TritonKernels:
    return TritonKernels(tuning)


@pytest.fixture(scope="module")
def packing(tuning: Tuning) -> TritonPacking:
    return TritonPacking(tuning)


@pytest.fixture(autouse=True)
def seeded() -> None:
    torch.manual_seed(0)


def randn(*shape: int, dtype: torch.dtype = torch.float32) -> Tensor:
    return torch.randn(shape).to(dtype).to(DEVICE)


@pytest.mark.parametrize("dtype", COMPUTED)
@pytest.mark.parametrize("has_residual", [False, True])
def test_rms_norm(kernels: TritonKernels, relative_error: Error, dtype: torch.dtype, has_residual: bool) -> None:
    x, weight = randn(5, 200, dtype=dtype), randn(200)
    mine = randn(5, 200, dtype=dtype) if has_residual else None
    own = None if mine is None else mine.clone()
    got, want = kernels.rms_norm(x, weight, 1e-5, residual=mine), REFERENCE.rms_norm(x, weight, 1e-5, residual=own)
    assert relative_error(got, want) < BOUNDS[dtype]
    if mine is not None and own is not None:
        assert torch.equal(mine, own)


def test_rms_norm_of_heads_that_are_part_of_a_wider_tensor(kernels: TritonKernels, relative_error: Error) -> None:
    heads, weight = randn(3, 9, 80)[:, 2:7], randn(80)
    assert relative_error(kernels.rms_norm(heads, weight, 1e-6), REFERENCE.rms_norm(heads, weight, 1e-6)) < BOUNDS[torch.float32]


@pytest.mark.parametrize("activation", ["silu", "gelu_tanh"])
def test_gated_activation(kernels: TritonKernels, relative_error: Error, activation: str) -> None:
    gate_up = 4 * randn(3, 2 * 1300)
    assert relative_error(kernels.gated_activation(gate_up, activation), REFERENCE.gated_activation(gate_up, activation)) < 2e-6


def test_select(kernels: TritonKernels) -> None:
    x, rows = randn(7, 3, 50), torch.tensor([6, 0, 3], device=DEVICE)
    assert torch.equal(kernels.select(x, rows), x[rows])
    assert torch.equal(kernels.select(x.flatten(1)[:, :20], rows), x.flatten(1)[rows, :20])
    assert kernels.select(x, rows[:0]).shape == (0, 3, 50)


@pytest.mark.parametrize(("head_dim", "rotary_dim"), [(64, 64), (80, 32), (96, 96)])
@pytest.mark.parametrize("stored", [torch.float32, torch.float16, torch.int8, FP8])
def test_rotary_and_the_write_to_the_cache(
    kernels: TritonKernels, relative_error: Error, head_dim: int, rotary_dim: int, stored: torch.dtype
) -> None:
    """The kernels' caches hold what the reference's hold, padding rows leave nothing, and both ways of writing are alike."""
    heads, kv_heads, size, tokens = 9, 2, 4, 7
    query, key, value = torch.split(3 * randn(tokens, heads + 2 * kv_heads, head_dim), [heads, kv_heads, kv_heads], dim=1)
    key[0, 0] *= 1000  # beyond FP8's largest number
    cos_sin, positions = randn(32, rotary_dim), torch.randperm(32)[:tokens].to(DEVICE)
    slots = torch.randperm(6 * size)[:tokens].to(DEVICE)
    slots[3] = -1
    caches = [torch.zeros(6, 2, size, kv_heads, head_dim).to(stored).to(DEVICE) for _ in range(3)]
    scales = [torch.zeros(6, 2, size, kv_heads, device=DEVICE) if stored == torch.int8 else None for _ in range(3)]
    turned, keys = query.clone(), key.clone()
    REFERENCE.rotary(turned, keys, cos_sin, positions)
    REFERENCE.scatter_kv(keys, value, caches[0], slots, kv_scales=scales[0])
    apart, apart_keys = query.clone(), key.clone()
    kernels.rotary(apart, apart_keys, cos_sin, positions)
    kernels.scatter_kv(apart_keys, value, caches[1], slots, kv_scales=scales[1])
    kernels.rotary_scatter(query, key, value, cos_sin, positions, caches[2], slots, kv_scales=scales[2])
    assert relative_error(query, turned) < 1e-6
    assert torch.equal(apart, query)
    assert relative_error(apart_keys, keys) < 1e-6
    for cache, scale in zip(caches[1:], scales[1:], strict=True):
        held, wanted = cache.float(), caches[0].float()
        # A value on the edge between two numbers may become either.
        step = wanted.abs() / 8 + 2**-9 if stored == FP8 else torch.full_like(wanted, 1.0 if stored == torch.int8 else 1e-5)
        is_near = (held - wanted).abs() <= step
        if stored == FP8 and IS_INTERPRETED:  # which forgets the carry into the exponent, one time in a hundred
            assert float(is_near.float().mean()) > 0.97
        else:
            assert bool(is_near.all())
            assert stored not in (torch.int8, FP8) or float((held == wanted).float().mean()) > 0.98
        if scale is not None and scales[0] is not None:
            assert relative_error(scale, scales[0]) < 1e-6


@pytest.mark.parametrize("stored", [pytest.param(FP8, marks=needs_device), torch.float16])
def test_a_nan_is_written_to_the_cache_as_one(kernels: TritonKernels, stored: torch.dtype) -> None:
    """A number in its place would be read by every later token."""
    key, value = randn(2, 1, 16), randn(2, 1, 16)
    key[0, 0, 3], value[1, 0, 5] = float("nan"), float("nan")
    cache = torch.zeros(1, 2, 4, 1, 16).to(stored).to(DEVICE)
    kernels.scatter_kv(key, value, cache, torch.tensor([1, 2]).to(DEVICE))
    places = cache.float().isnan().nonzero().tolist()
    assert places == [[0, 0, 1, 0, 3], [0, 1, 2, 0, 5]]


ROWS = [(1, 5), (1, 150), (1, 1), (3, 3), (9, 60)]
"""(tokens, context): three rows that decode, two of a prompt."""


@pytest.mark.parametrize("window", [None, 20])
@pytest.mark.parametrize(
    ("heads", "kv_heads", "head_dim", "computed", "stored"),
    [
        (6, 2, 64, torch.float32, torch.float32),
        (7, 1, 80, torch.float32, torch.int8),
        (4, 4, 96, torch.float32, FP8),
        (4, 2, 256, torch.float16, torch.float16),
        (6, 2, 64, torch.float32, torch.float16),
        pytest.param(8, 2, 128, torch.bfloat16, torch.bfloat16, marks=needs_device),
        pytest.param(8, 2, 128, torch.bfloat16, torch.int8, marks=needs_device),
        pytest.param(8, 2, 128, torch.bfloat16, FP8, marks=needs_device),
        pytest.param(8, 1, 256, torch.bfloat16, torch.bfloat16, marks=needs_device),
    ],
)
def test_attention(
    kernels: TritonKernels, relative_error: Error, paged_batch: Make, window: int | None, heads: int, kv_heads: int, head_dim: int,
    computed: torch.dtype, stored: torch.dtype,
) -> None:  # fmt: skip
    """With as many rows told to be of one token as there are, with fewer and with none: a hint changes no result."""
    batch = paged_batch(ROWS, heads=heads, kv_heads=kv_heads, head_dim=head_dim, dtype=computed)
    batch = batch if stored == computed else batch.stored_as(stored)
    want = batch.attend(REFERENCE, window=window)
    scales = None if batch.kv_scales is None else batch.kv_scales.to(DEVICE)
    arguments = [tensor.to(DEVICE) for tensor in (batch.query, batch.cache, batch.block_table, batch.row_starts, batch.context_lens)]
    for num_decodes in (3, 1, 0):
        got = kernels.attention(*arguments, scale=head_dim**-0.5, window=window, kv_scales=scales, num_decodes=num_decodes)
        assert got.dtype == computed
        assert relative_error(got.cpu(), want) < BOUNDS[computed]


@pytest.mark.parametrize("num_decodes", [3, 0])
def test_what_lies_before_the_window_is_not_read(
    kernels: TritonKernels, relative_error: Error, paged_batch: Make, num_decodes: int
) -> None:
    """Blocks there may be another sequence's by now: their values are NaN, and so would be all that they are multiplied with."""
    window = 20
    batch = paged_batch(ROWS, heads=4, kv_heads=2, head_dim=32, block_size=4)
    want = batch.attend(REFERENCE, window=window)
    for row, (count, context) in enumerate(ROWS):
        for position in range(max(0, context - count - window + 1)):
            batch.cache[batch.block_table[row, position // 4], :, position % 4] = torch.nan
    arguments = [tensor.to(DEVICE) for tensor in (batch.query, batch.cache, batch.block_table, batch.row_starts, batch.context_lens)]
    got = kernels.attention(*arguments, scale=32**-0.5, window=window, num_decodes=num_decodes)
    assert relative_error(got.cpu(), want) < BOUNDS[torch.float32]


def test_attention_of_many_decoding_rows_is_not_split(kernels: TritonKernels, relative_error: Error, paged_batch: Make) -> None:
    rows = 13 if IS_INTERPRETED else 257
    batch = paged_batch([(1, 20)] * rows, heads=2, kv_heads=2, head_dim=16)
    arguments = [tensor.to(DEVICE) for tensor in (batch.query, batch.cache, batch.block_table, batch.row_starts, batch.context_lens)]
    got = kernels.attention(*arguments, scale=0.25, num_decodes=rows)
    assert relative_error(got.cpu(), batch.attend(REFERENCE)) < BOUNDS[torch.float32]


def test_many_shares_are_added_up(kernels: TritonKernels, relative_error: Error, paged_batch: Make) -> None:
    """Ten shares and three; three query heads, which a tile pads."""
    batch = paged_batch([(1, 600), (1, 180)], heads=3, kv_heads=1, head_dim=32)
    arguments = [tensor.to(DEVICE) for tensor in (batch.query, batch.cache, batch.block_table, batch.row_starts, batch.context_lens)]
    got = kernels.attention(*arguments, scale=32**-0.5, num_decodes=2)
    assert relative_error(got.cpu(), batch.attend(REFERENCE)) < BOUNDS[torch.float32]


@pytest.mark.parametrize("num_decodes", [4, 0])
def test_a_padding_row_of_context_zero_gives_zeros(kernels: TritonKernels, paged_batch: Make, num_decodes: int) -> None:
    batch = paged_batch([(1, 9)] * 4, heads=4, kv_heads=2, head_dim=32)
    batch.context_lens[2] = 0
    arguments = [tensor.to(DEVICE) for tensor in (batch.query, batch.cache, batch.block_table, batch.row_starts, batch.context_lens)]
    got = kernels.attention(*arguments, scale=0.2, num_decodes=num_decodes)
    assert not got[2].any()
    assert got.isfinite().all()
    assert got[[0, 1, 3]].abs().amax(dim=(1, 2)).min() > 0


INTEGERS = [Precision.INT8, Precision.INT4]


@pytest.mark.parametrize("rows", [1, 9, 40, 70])
@pytest.mark.parametrize("shape", [(64, 1024), (48, 896), (20, 200)])
@pytest.mark.parametrize("precision", INTEGERS)
def test_products_of_small_integers(
    packing: TritonPacking, relative_error: Error, precision: Precision, shape: tuple[int, int], rows: int
) -> None:
    """Against the weight that the integers stand for: inputs are not rounded. The last shape is padded, and its groups are small."""
    weight, bias, x = randn(*shape), randn(shape[0]), randn(rows, shape[1])
    rounded = packing.round_weight(weight, precision)
    linear = packing.pack_rounded(rounded, bias)
    assert isinstance(linear, StoredLinear if shape[0] % 16 == 0 else PaddedLinear)
    assert relative_error(linear(x), x @ rounded.dense().T + bias) < 3e-6
    assert linear(x[:0]).shape == (0, shape[0])


@pytest.mark.parametrize("rows", [3, 100, 255, 257])
@pytest.mark.parametrize("dtype", [torch.float16, pytest.param(torch.bfloat16, marks=needs_device)])
@pytest.mark.parametrize("precision", INTEGERS)
def test_products_of_small_integers_in_half_precision(
    packing: TritonPacking, relative_error: Error, precision: Precision, dtype: torch.dtype, rows: int
) -> None:
    """More rows than float32 takes, whose tiles scale weights, and so many that a library takes them."""
    rounded = packing.round_weight(randn(64, 1024), precision)
    x = randn(rows, 1024, dtype=dtype)
    assert relative_error(packing.pack_rounded(rounded, None)(x), x.float() @ rounded.dense().T) < BOUNDS[dtype]


@pytest.mark.parametrize("rows", [1, 40, 600])
@pytest.mark.parametrize("shape", [(256, 1024), (72, 160)])
def test_stored_scales_and_zero_points(packing: TritonPacking, relative_error: Error, shape: tuple[int, int], rows: int) -> None:
    """As a quantized checkpoint has them; the scales are exact in bfloat16."""
    scales = (torch.rand(shape[0], shape[1] // 32) + 0.5).bfloat16().half().to(DEVICE)
    zeros = torch.randint(-7, 8, scales.shape).half().to(DEVICE)
    weight = RoundedWeight(torch.randint(-8, 8, shape, dtype=torch.int8).to(DEVICE), scales, 32, zeros)
    x, bias = randn(rows, shape[1]), randn(shape[0])
    assert relative_error(packing.pack_rounded(weight, bias)(x), x @ weight.dense().T + bias) < 3e-6


def test_a_weight_that_is_dense_in_parts(packing: TritonPacking, relative_error: Error, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("headrace.tensor.kernels.gpu.linears.SLAB_ELEMENTS", 64 * 256)
    rounded, bias, x = packing.round_weight(randn(144, 256), Precision.INT4), randn(144), randn(65, 256)
    assert relative_error(packing.pack_rounded(rounded, bias)(x), x @ rounded.dense().T + bias) < 3e-6


@pytest.mark.parametrize("rows", [1, 30])
def test_a_head_has_a_product_of_its_own(packing: TritonPacking, relative_error: Error, rows: int) -> None:
    weight, x = randn(65536, 32, dtype=torch.float16), randn(rows, 32, dtype=torch.float16)
    if IS_INTERPRETED:  # a thousand programs: a smaller weight, and a table that calls it large
        weight = weight[:128].contiguous()
        plain = tuple(replace(each, min_outputs=128) for each in packing.tuning.products["plain"])
        packing = TritonPacking(replace(packing.tuning, products={"plain": plain}))
    got = packing.pack_linear(weight, None)(x)
    assert relative_error(got, x.float() @ weight.float().T) < BOUNDS[torch.float16]


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
@pytest.mark.parametrize("rows", [1, 9, 32])
@pytest.mark.parametrize("shape", [(64, 512), (20, 200)])
def test_products_of_few_rows_in_fp8(
    packing: TritonPacking, relative_error: Error, shape: tuple[int, int], rows: int, dtype: torch.dtype
) -> None:
    """As exact as the rounded weight: inputs are not rounded."""
    weight, bias, x = randn(*shape), randn(shape[0]), randn(rows, shape[1], dtype=dtype)
    rounded = packing.round_weight(weight, Precision.FP8)
    got = packing.pack_rounded(rounded, bias)(x)
    assert got.dtype == dtype
    assert relative_error(got, x.float() @ rounded.dense().T + bias) < (3e-6 if dtype == torch.float32 else BOUNDS[dtype])


@needs_device
@pytest.mark.parametrize(("rows", "bound"), [(1, 5e-3), (32, 5e-3), (200, 8e-2)])
@pytest.mark.parametrize("shape", [(6144, 4096), (20, 200)])
def test_products_in_fp8(packing: TritonPacking, relative_error: Error, shape: tuple[int, int], rows: int, bound: float) -> None:
    """Few rows are as exact as the rounded weight; many rows round their inputs."""
    weight, bias, x = (randn(*sizes, dtype=torch.bfloat16) for sizes in (shape, shape[:1], (rows, shape[1])))
    rounded = packing.round_weight(weight, Precision.FP8)
    got = packing.pack_rounded(rounded, bias)(x)
    assert relative_error(got, x.float() @ rounded.dense().T + bias.float()) < bound
    assert relative_error(got, PLAIN.pack_rounded(rounded, bias)(x)) < 8e-2


@pytest.mark.parametrize("tokens", [1, 7, 40])
@pytest.mark.parametrize("dtype", [torch.float32, pytest.param(torch.bfloat16, marks=needs_device)])
@pytest.mark.parametrize("precision", [Precision.NONE, Precision.FP8, *INTEGERS])
def test_experts(packing: TritonPacking, relative_error: Error, precision: Precision, dtype: torch.dtype, tokens: int) -> None:
    """Against one expert after another; the linears, whose weights became views, stay what they were. Some tokens choose none."""
    num_experts, hidden, size = 6, 128, 128
    weights = [[randn(*shape, dtype=dtype) / 8 for _ in range(num_experts)] for shape in ((2 * size, hidden), (hidden, size))]
    rounded = [[_rounded(packing, weight, precision) for weight in each] for each in weights]
    linears = [[packing.pack_rounded(each, None) if isinstance(each, RoundedWeight) else packing.pack_linear(each, None) for each in some]
               for some in rounded]  # fmt: skip
    dense = [[each.dense() if isinstance(each, RoundedWeight) else each.float() for each in some] for some in rounded]
    run = packing.group_experts(linears[0], linears[1], "silu")
    assert run is not None
    x, chosen = randn(tokens, hidden, dtype=dtype), torch.stack([torch.randperm(num_experts + 1)[:2] for _ in range(tokens)])
    is_one = chosen.view(-1) < num_experts
    want = torch.cat(
        [dense[1][expert] @ REFERENCE.gated_activation((dense[0][expert] @ x[token].float())[None], "silu")[0]
         for token in range(tokens) for expert in chosen[token].tolist() if expert < num_experts]
    ).view(-1, hidden)  # fmt: skip
    bound = 3e-6 if dtype == torch.float32 else 3e-2
    assert relative_error(run(x, chosen.to(DEVICE))[is_one.to(DEVICE)], want) < bound
    assert relative_error(linears[0][3](x[:9]), x[:9].float() @ dense[0][3].T) < bound


def _rounded(packing: TritonPacking, weight: Tensor, precision: Precision) -> RoundedWeight | Tensor:
    return weight if precision is Precision.NONE else packing.round_weight(weight, precision)


def test_pairs_beyond_one_program_are_ordered_alike(monkeypatch: pytest.MonkeyPatch) -> None:
    from headrace.tensor.kernels.gpu import experts

    chosen = torch.randint(0, 5, (60,)).to(DEVICE)
    small = experts.order_by_expert(chosen, 7)
    monkeypatch.setattr(experts, "MAX_SMALL", 10)
    large = experts.order_by_expert(chosen, 7)
    assert torch.equal(small[0], large[0])
    assert torch.equal(small[1], large[1])
    assert small[1].tolist() == [int((chosen < expert).sum()) for expert in range(8)]


SIZES: dict[str, Any] = {
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "num_hidden_layers": 2,
    "vocab_size": 90,
    "max_position_embeddings": 64,
    "rms_norm_eps": 1e-6,
    "rope_theta": 10000.0,
}
MODELS: dict[str, dict[str, Any]] = {
    "LlamaForCausalLM": {},
    "Gemma3ForCausalLM": {
        "head_dim": 32,
        "layer_types": ["sliding_attention", "full_attention"],
        "sliding_window": 6,
        "query_pre_attn_scalar": 32,
        "hidden_activation": "gelu_pytorch_tanh",
        "rope_local_base_freq": 1000.0,
    },
    "MixtralForCausalLM": {"num_local_experts": 4, "num_experts_per_tok": 2},
}


def read_model(folder: Path, architecture: str, backend: Backend) -> DecoderModel:
    """Random weights, the same for every backend."""
    (folder / "config.json").write_text(json.dumps({**SIZES, **MODELS[architecture], "architectures": [architecture]}), encoding="utf-8")
    spec = ARCHITECTURES[architecture](read_config(folder))
    source = RandomWeights(5, torch.float32, 1.0 - spec.norm_plus)
    return DecoderModel(WeightReader(source, backend, torch.float32, DEVICES[DEVICE]), spec)


def last_logits(model: DecoderModel) -> Tensor:
    """Two rows decode beside a prompt, after a step that computed what comes before."""
    size, table = 4, torch.arange(1, 25, dtype=torch.int32).view(3, 8)
    kv = allocate_kv(model.kv_shapes, model.group_of, tuple(30 for _ in model.kv_groups), size, torch.float32, DEVICES[DEVICE])
    ids = torch.arange(3 * 30).view(3, 30) * 7 % 90
    for counts, contexts, num_decodes in (((9, 17, 0), (9, 17, 0), 0), ((1, 1, 11), (10, 18, 11), 2)):
        rows = [row for row, count in enumerate(counts) if count]
        spans = [torch.arange(contexts[row] - counts[row], contexts[row]) for row in rows]
        slots = torch.cat([table[row, span // size] * size + span % size for row, span in zip(rows, spans, strict=True)]).long()
        starts = torch.tensor([0, *(counts[row] for row in rows)]).cumsum(0).int()
        groups = tuple(GroupBatch(table[rows].to(DEVICE), slots.to(DEVICE)) for _ in model.kv_groups)
        lens = torch.tensor([contexts[row] for row in rows], dtype=torch.int32)
        positions, tokens = torch.cat(spans), torch.cat([ids[row, span] for row, span in zip(rows, spans, strict=True)])
        batch = ForwardBatch(positions.to(DEVICE), starts.to(DEVICE), lens.to(DEVICE), max(counts), groups, num_decodes=num_decodes)
        hidden = model.forward(tokens.to(DEVICE), batch, kv)
    return model.logits(hidden[(starts[1:] - 1).to(DEVICE)])


@pytest.mark.parametrize("architecture", MODELS)
def test_a_model_gives_the_references_logits(
    tmp_path: Path, tuning: Tuning, packing: TritonPacking, relative_error: Error, architecture: str
) -> None:
    triton_backend = Backend(name="triton", kernels=TritonKernels(tuning), packing=packing, group_experts=packing.group_experts)
    with torch.inference_mode():
        got, want = (last_logits(read_model(tmp_path, architecture, backend)) for backend in (triton_backend, BACKEND))
    assert relative_error(got, want) < 2e-5
