"""Lists one CPU of each kind that choices are made by, whichever this machine has."""

from __future__ import annotations

from headrace.tensor.host.cpu_features import CpuFeatures

GENERIC = CpuFeatures("x86_64", frozenset({"sse4_2"}))
AVX2 = CpuFeatures("x86_64", frozenset({"sse4_2", "fma", "avx2"}))
AVX2_VNNI = CpuFeatures("x86_64", AVX2.flags | {"avx_vnni"})
AVX512 = CpuFeatures("x86_64", AVX2.flags | {"avx512f", "avx512bw"})
AVX512_VNNI = CpuFeatures("x86_64", AVX512.flags | {"avx512_vnni"})
AVX512_BF16 = CpuFeatures("x86_64", AVX512_VNNI.flags | {"avx512_bf16"})
AMX_BF16 = CpuFeatures("x86_64", AVX512_BF16.flags | {"amx_bf16"})
ARM = CpuFeatures("aarch64", frozenset({"asimd"}))
ARM_BF16 = CpuFeatures("aarch64", ARM.flags | {"bf16"})
