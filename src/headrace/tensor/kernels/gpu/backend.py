"""The backend for NVIDIA GPUs: kernels in Triton, dense products of many rows by torch's libraries."""

from __future__ import annotations

import logging

import torch
from torch import Tensor

from headrace.core.errors import ConfigError
from headrace.tensor.host.cpu_features import CpuFeatures
from headrace.tensor.host.fresh_memory import empty
from headrace.tensor.kernels import Backend
from headrace.tensor.kernels.gpu import elementwise, rotary
from headrace.tensor.kernels.gpu.adapters import TritonAdapters
from headrace.tensor.kernels.gpu.attention import decode_attention, prefill_attention
from headrace.tensor.kernels.gpu.choice import TritonChoice
from headrace.tensor.kernels.gpu.compiler import TritonCompiler
from headrace.tensor.kernels.gpu.counters import arrival_counters
from headrace.tensor.kernels.gpu.linears import TritonPacking
from headrace.tensor.kernels.gpu.tuning import Tuning, read_tuning

log = logging.getLogger(__name__)


class TritonKernels:
    """Implements `Kernels`."""

    def __init__(self, tuning: Tuning) -> None:
        self.tuning = tuning

    def select(self, x: Tensor, rows: Tensor) -> Tensor:
        return elementwise.select(x, rows)

    def rms_norm(self, x: Tensor, weight: Tensor, eps: float, *, residual: Tensor | None = None) -> Tensor:
        return elementwise.rms_norm(x, weight, eps, residual)

    def rotary(self, query: Tensor, key: Tensor, cos_sin: Tensor, positions: Tensor) -> None:
        rotary.rotary(query, key, cos_sin, positions)

    def scatter_kv(self, key: Tensor, value: Tensor, cache: Tensor, slot_mapping: Tensor, *, kv_scales: Tensor | None = None) -> None:
        rotary.scatter_kv(key, value, cache, slot_mapping, kv_scales)

    def rotary_scatter(
        self, query: Tensor, key: Tensor, value: Tensor, cos_sin: Tensor, positions: Tensor, cache: Tensor, slot_mapping: Tensor,
        *, kv_scales: Tensor | None = None,
    ) -> None:  # fmt: skip
        rotary.rotary_scatter(query, key, value, cos_sin, positions, cache, slot_mapping, kv_scales)

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
        out = empty(query.shape, query.dtype, query.device)
        if num_decodes:
            decode_attention(
                query[:num_decodes], cache, block_table[:num_decodes], context_lens[:num_decodes], out[:num_decodes],
                scale=scale, window=window, kv_scales=kv_scales, tuning=self.tuning,
            )  # fmt: skip
        if len(query) > num_decodes:
            prefill_attention(
                query, cache, block_table, row_starts, context_lens, out, num_decodes,
                scale=scale, window=window, kv_scales=kv_scales, tuning=self.tuning,
            )  # fmt: skip
        return out

    def gated_activation(self, gate_up: Tensor, activation: str) -> Tensor:
        return elementwise.gated_activation(gate_up, activation)


def make_backend(*, deterministic: bool, features: CpuFeatures) -> Backend:
    if deterministic:
        raise ConfigError(
            "deterministic",
            "triton kernels split sums, and leave products to a library, by the number of rows",
            "Use kernels numba, which need device cpu.",
        )
    tuning, name = read_tuning(), torch.cuda.get_device_name()
    if name != tuning.device:
        log.info("%s: the kernels' block sizes were measured on %s", name, tuning.device)
    arrival_counters(torch.device("cuda", torch.cuda.current_device()))
    packing = TritonPacking(tuning)
    return Backend(
        name="triton",
        kernels=TritonKernels(tuning),
        packing=packing,
        compiler=TritonCompiler(),
        choice=TritonChoice(),
        adapters=TritonAdapters("cuda"),
        group_experts=packing.group_experts,
        numerics=f"{name}, CUDA {torch.version.cuda}",
    )
