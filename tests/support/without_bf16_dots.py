"""Computes products of bfloat16 pairs by fused multiply-adds, as a pytest plugin: like CPUs that have no instruction for them.

`python -m pytest -p tests.support.without_bf16_dots ...`, with a kernel cache of its own: compiled code on disk is found by source and CPU.
"""

from __future__ import annotations

from headrace.tensor.kernels.cpu.jit import vector_ir

vector_ir.HAS_BF16_DOTS = False
