"""The CPU backend: Numba kernels for every operation, and linear layers by `linear_path`.

Experts are routed and summed by torch on every backend (`layers.moe`).
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext

import torch
from torch import Tensor

from headrace.core.errors import ConfigError
from headrace.tensor.host.cpu_features import CpuFeatures, LinearPath, linear_path, read_cpu_features
from headrace.tensor.kernels import Backend, Kernels, Linear, PackedLinear, RowReader
from headrace.tensor.kernels.cpu import adapters, cache_write, draw, elementwise, mask, stored_rows
from headrace.tensor.kernels.cpu.ahead import compiling_ahead
from headrace.tensor.kernels.cpu.attention import paged as attention
from headrace.tensor.kernels.cpu.integer import packing as integer_packing
from headrace.tensor.kernels.cpu.integer import quantized
from headrace.tensor.kernels.cpu.integer.simd import STRIP_COLUMNS
from headrace.tensor.kernels.cpu.jit import vector_ir
from headrace.tensor.kernels.cpu.jit.disk_cache import DISK, report_compiling
from headrace.tensor.kernels.cpu.jit.launch import CACHE, allocate_result, set_thread_limit, thread_limit, threading_layer
from headrace.tensor.kernels.cpu.launch_list import (
    MAX_RESULT_BYTES,
    RecordedLaunches,
    deferred_launches,
    next_layer,
    recording,
    run_pending,
)
from headrace.tensor.kernels.cpu.linear import OneDnnLinear, StripLinear, onednn_takes
from headrace.tensor.kernels.cpu.packing import DEPTH, can_strip
from headrace.tensor.kernels.filters import Doubles, FilterLimits, Floats, Ints, Words
from headrace.tensor.kernels.reference import KERNELS as REFERENCE
from headrace.tensor.kernels.reference import PACKING as PLAIN_PACKING
from headrace.tensor.kernels.rounding import Precision, RoundedWeight

FEW_TOKENS = 64
"""Tokens in a step up to which waking threads, and Python between kernels, count, so that these are deferred."""
_DTYPES = (torch.float32, torch.bfloat16)


def _fits(*tensors: Tensor) -> bool:
    dtype = tensors[0].dtype
    return dtype in _DTYPES and all(t.dtype == dtype and t.stride(-1) == 1 and t.device.type == "cpu" for t in tensors)


def _fits_cache(x: Tensor, cache: Tensor, kv_scales: Tensor | None) -> bool:
    """A cache of another dtype than x's needs heads of whole registers."""
    if (cache.dtype == torch.int8) != (kv_scales is not None) or cache.stride(-1) != 1 or cache.device.type != "cpu":
        return False
    if kv_scales is not None and (kv_scales.dtype != torch.float32 or kv_scales.stride(-1) != 1):
        return False
    return cache.dtype == x.dtype or (attention.supports(x.shape[-1]) and (x.dtype, cache.dtype) in attention.MIXED)


def _not_invariant(what: str) -> ConfigError:
    reason = f"{what} is computed by a library here, whose rounding may depend on the batch"
    return ConfigError("deterministic", reason, "Leave it out for this model.")


class OutsideLinear:
    runs_only_kernels = True

    def __init__(self, linear: Linear) -> None:
        self.in_features, self.out_features, self.weight_bytes = linear.in_features, linear.out_features, linear.weight_bytes
        self._linear = linear

    def __call__(self, x: Tensor) -> Tensor:
        run_pending()
        return self._linear(x)


class NumbaPacking:
    """Implements `WeightPacking` and `PackedFormat`. deterministic: a linear that strips cannot hold is refused."""

    keeps_stored = True

    def __init__(self, *, deterministic: bool, features: CpuFeatures) -> None:
        self.deterministic, self.features = deterministic, features

    def pack_linear(self, weight: Tensor, bias: Tensor | None, dtype: torch.dtype | None = None) -> Linear:
        dtype = dtype or weight.dtype
        if self.deterministic and weight.numel() > 0 and not (_fits(weight) and dtype in _DTYPES and can_strip(weight)):
            raise _not_invariant(f"a linear of {list(weight.shape)} in {dtype}")
        if not _fits(weight) or dtype not in _DTYPES:
            return OutsideLinear(PLAIN_PACKING.pack_linear(weight, bias, dtype))
        path = self._path(dtype)
        if path is not LinearPath.ONEDNN and can_strip(weight):
            return StripLinear.pack(weight, bias, torch.bfloat16 if path is LinearPath.BF16_STRIPS else torch.float32)
        if onednn_takes(dtype) and weight.numel() > 0:
            return OneDnnLinear(weight.to(dtype), bias)
        return OutsideLinear(PLAIN_PACKING.pack_linear(weight, bias, dtype))

    def _path(self, dtype: torch.dtype) -> LinearPath:
        """The path by this CPU's family, as far as the kernels were compiled for it: LLVM may know less of it than the system."""
        path = linear_path(self.features, dtype)
        if path is not LinearPath.BF16_STRIPS:
            return LinearPath.STRIPS if self.deterministic else path
        is_missing = self.features == read_cpu_features() and not vector_ir.HAS_BF16_DOTS
        return LinearPath.STRIPS if is_missing else path

    def activation_dtype(self, dtype: torch.dtype) -> torch.dtype:
        return torch.float32 if self._path(dtype) is LinearPath.BF16_STRIPS else dtype

    def round_weight(self, weight: Tensor, precision: Precision) -> RoundedWeight:
        if precision is Precision.FP8:
            raise ConfigError("quantization", "fp8 products are for GPUs that have them, and this is a CPU", "Use int8.")
        return integer_packing.round_weight(weight, precision)

    def can_pack(self, weight: RoundedWeight) -> bool:
        return weight.values.dtype == torch.int8 and weight.values.device.type == "cpu" and quantized.can_pack(weight)

    def pack_rounded(self, weight: RoundedWeight, bias: Tensor | None) -> Linear:
        if self.can_pack(weight):
            return quantized.IntegerLinear.pack(weight, bias)
        if self.deterministic:
            raise _not_invariant(f"a rounded linear of {list(weight.values.shape)}")
        return OutsideLinear(PLAIN_PACKING.pack_rounded(weight, bias))

    def packed_layout(self, precision: Precision) -> str:
        paths = [self._path(dtype) for dtype in _DTYPES]
        layout = f"strips of {STRIP_COLUMNS}, bytes in order, pieces of {DEPTH}, {paths}"
        return layout if precision is not Precision.NONE else f"{layout}, blocks for {thread_limit()} threads"

    def packed(self, linear: Linear) -> PackedLinear | None:
        return linear.packed() if isinstance(linear, quantized.IntegerLinear | StripLinear) else None

    def load_packed(self, packed: PackedLinear) -> Linear:
        return (StripLinear if packed.kind in StripLinear.KINDS.values() else quantized.IntegerLinear).of(packed)

    def row_reader(self) -> RowReader:
        stored_rows.prepare()
        return stored_rows.read_rows


class NumbaExecutor:
    """Implements `StepExecutor`, see `launch_list`."""

    max_recorded_bytes = MAX_RESULT_BYTES

    def deferred(self, num_tokens: int) -> AbstractContextManager[None]:
        return deferred_launches() if num_tokens <= FEW_TOKENS else nullcontext()

    def recording(self, num_tokens: int) -> AbstractContextManager[RecordedLaunches] | None:
        return recording() if num_tokens <= FEW_TOKENS else None

    def next_layer(self) -> None:
        next_layer()


class NumbaCompiler:
    packages: tuple[str, ...] = ("numba", "llvmlite")
    expected: int | None = 115
    """Counted by tests/engine/runner/test_warmup.py; the exact number is known only once all are compiled."""

    def limit_threads(self, num_threads: int) -> str:
        layer = threading_layer()
        set_thread_limit(num_threads)
        return layer

    def kept(self) -> tuple[bool, str]:
        return CACHE.directory is not None and DISK.refusal is None, DISK.refusal or CACHE.reason

    def reporting(self, report: Callable[[int], None]) -> AbstractContextManager[None]:
        return report_compiling(report)

    def ahead(self, dtype: torch.dtype, kv_dtype: torch.dtype) -> AbstractContextManager[None]:
        return compiling_ahead(dtype, kv_dtype)


class NumbaKernels:
    """Implements `Kernels`. deterministic: operations that only the reference can compute are refused."""

    def __init__(self, *, deterministic: bool) -> None:
        self.deterministic = deterministic

    def _reference(self, what: str) -> Kernels:
        """The reference, for one operation; pending launches are run first. Raises ConfigError where this backend is deterministic."""
        if self.deterministic:
            raise _not_invariant(what)
        run_pending()
        return REFERENCE

    def select(self, x: Tensor, rows: Tensor) -> Tensor:
        run_pending()
        return x.index_select(0, rows)

    def rms_norm(self, x: Tensor, weight: Tensor, eps: float, *, residual: Tensor | None = None) -> Tensor:
        others = (x,) if residual is None else (x, residual)
        weight_fits = weight.stride(0) == 1 and (weight.dtype == x.dtype or weight.dtype == torch.float32)
        if not weight_fits or not _fits(*others) or (residual is not None and x.dim() != 2):
            return self._reference(f"a norm in {x.dtype} by weights in {weight.dtype}").rms_norm(x, weight, eps, residual=residual)
        return elementwise.rms_norm(x, weight, eps, residual)

    def rotary(self, query: Tensor, key: Tensor, cos_sin: Tensor, positions: Tensor) -> None:
        if not _fits(query, key) or not _fits(cos_sin) or cos_sin.dtype != torch.float32:
            self._reference(f"a rotation in {query.dtype}").rotary(query, key, cos_sin, positions)
        else:
            cache_write.rotary(query, key, cos_sin, positions)

    def scatter_kv(self, key: Tensor, value: Tensor, cache: Tensor, slot_mapping: Tensor, *, kv_scales: Tensor | None = None) -> None:
        if not _fits(key, value) or not _fits_cache(key, cache, kv_scales):
            reference = self._reference(f"a write in {key.dtype} to a cache of {cache.dtype}")
            reference.scatter_kv(key, value, cache, slot_mapping, kv_scales=kv_scales)
        else:
            cache_write.scatter_kv(key, value, cache, slot_mapping, kv_scales)

    def rotary_scatter(
        self, query: Tensor, key: Tensor, value: Tensor, cos_sin: Tensor, positions: Tensor, cache: Tensor, slot_mapping: Tensor,
        *, kv_scales: Tensor | None = None,
    ) -> None:  # fmt: skip
        fits = _fits(query, key, value) and _fits(cos_sin) and cos_sin.dtype == torch.float32 and _fits_cache(key, cache, kv_scales)
        if fits:
            cache_write.rotary_scatter(query, key, value, cos_sin, positions, cache, slot_mapping, kv_scales)
        else:
            reference = self._reference(f"a write of heads of {key.shape[2]} in {key.dtype} to a cache of {cache.dtype}")
            reference.rotary_scatter(query, key, value, cos_sin, positions, cache, slot_mapping, kv_scales=kv_scales)

    def attention(
        self,
        query: Tensor,
        cache: Tensor,
        block_table: Tensor,
        row_starts: Tensor,
        context_lens: Tensor,
        *,
        scale: float,
        window: int | None = None,
        kv_scales: Tensor | None = None,
        num_decodes: int = 0,
    ) -> Tensor:
        if not _fits(query) or not _fits_cache(query, cache, kv_scales) or not attention.supports(query.shape[2]):
            reference = self._reference(f"attention with heads of {query.shape[2]} in {query.dtype} over a cache of {cache.dtype}")
            rest = {"scale": scale, "window": window, "kv_scales": kv_scales}
            return reference.attention(query, cache, block_table, row_starts, context_lens, **rest)  # type: ignore[arg-type]
        out = allocate_result(query.shape, query.dtype)
        attention.paged_attention(query, cache, kv_scales, block_table, row_starts, context_lens, out, scale=scale, window=window)
        return out

    def gated_activation(self, gate_up: Tensor, activation: str) -> Tensor:
        if not _fits(gate_up) or activation not in elementwise.ACTIVATIONS:
            return self._reference(f"the activation {activation} in {gate_up.dtype}").gated_activation(gate_up, activation)
        return elementwise.gated_activation(gate_up, activation)


def draw_tokens(logits: Floats, peak: Floats, u: Doubles, limits: FilterLimits) -> Ints:
    """Pending launches, this draw included, have run when it returns."""
    tokens = draw.draw(logits, peak, u, limits)
    run_pending()
    return tokens


def mask_logits(logits: Floats, rows: Ints, masks: Words) -> tuple[Ints, Floats]:
    best = mask.apply_masks(logits, rows, masks)
    run_pending()
    return best


KERNELS = NumbaKernels(deterministic=False)
DETERMINISTIC = NumbaKernels(deterministic=True)
EXECUTOR = NumbaExecutor()
COMPILER = NumbaCompiler()


def compiled_numerics() -> str:
    """What changes a bit in LLVM's view of this CPU: register width, and the kind of bfloat16 products. Integer sums are exact."""
    return f"{vector_ir.LANES} lanes, bfloat16 products by {'dot instructions' if vector_ir.HAS_BF16_DOTS else 'multiply-adds'}"


def make_backend(*, deterministic: bool, features: CpuFeatures) -> Backend:
    kernels, packing = DETERMINISTIC if deterministic else KERNELS, NumbaPacking(deterministic=deterministic, features=features)
    return Backend(
        name="numba",
        kernels=kernels,
        packing=packing,
        packed_format=packing,
        compiler=COMPILER,
        executor=EXECUTOR,
        draw=draw_tokens,
        mask=mask_logits,
        adapters=adapters.ADAPTERS,
        numerics=f"{compiled_numerics()} {packing.packed_layout(Precision.INT8)}",  # which does not depend on the number of threads
    )
