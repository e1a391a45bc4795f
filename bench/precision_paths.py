"""Writes the table of docs/kernels.md that says which arithmetic and path each precision takes, by CPU family and number of rows.

    python -m bench.precision_paths

The table is made from the code; a test compares page and code. What depends on another CPU's registers is stated here by family. For the
CPU that runs the test, it is compared with the constants the kernels were compiled with.
"""

from __future__ import annotations

from bench.harness import ROOT, replace_block
from headrace.tensor.device import CPU, DTYPES
from headrace.tensor.host.cpu_features import CpuFeatures, LinearPath, linear_path
from headrace.tensor.kernels.cpu.integer.simd import ROWS as INTEGER_ROWS
from headrace.tensor.kernels.cpu.integer.simd import STRIPS as INTEGER_STRIPS

PAGE, BLOCK_NAME = ROOT / "docs" / "kernels.md", "precision paths"
ROWS = (1, 8, 64, 512)
CPUS = {
    "AVX-512 and AMX": CpuFeatures("x86_64", frozenset({"avx2", "avx512f", "avx512_vnni", "avx512_bf16", "amx_bf16"})),
    "AVX-512 and bfloat16 products": CpuFeatures("x86_64", frozenset({"avx2", "avx512f", "avx512_vnni", "avx512_bf16"})),
    "AVX-512 and VNNI": CpuFeatures("x86_64", frozenset({"avx2", "avx512f", "avx512_vnni"})),
    "AVX-512": CpuFeatures("x86_64", frozenset({"avx2", "avx512f"})),
    "AVX2 and VNNI": CpuFeatures("x86_64", frozenset({"avx2", "avx_vnni"})),
    "AVX2": CpuFeatures("x86_64", frozenset({"avx2"})),
}
"""One CPU of each kind that the table names. Kinds that compute alike share a row."""
DOTS = {"avx512_vnni", "avx_vnni"}
PANELS = {True: (12, 8, 4, 2, 1), False: (6, 4, 2, 1)}
"""Rows of x multiplied at once, the largest first; by whether the CPU has AVX-512. Without it 8 rows are left as two panels of 4."""


def panel_sizes(rows: int, features: CpuFeatures) -> list[int]:
    """Sizes of the panels that `rows` rows are cut into, in order."""
    sizes: list[int] = []
    panels = PANELS["avx512f" in features.flags]
    while rows:
        sizes.append(4 if rows == 8 and 8 not in panels else next(size for size in panels if size <= rows))
        rows -= sizes[-1]
    return sizes


def integer_arithmetic(precision: str, features: CpuFeatures) -> str:
    if features.flags & DOTS:
        return "32-bit integers, `vpdpbusd`"
    return f"32-bit integers, `{'vpmaddwd' if precision == 'int8' else 'vpmaddubsw'}`"


def float_row(stored: str, features: CpuFeatures) -> list[str]:
    dtype, _ = CPU.resolve_dtype("auto", stored, features)
    name = next(label for label, value in DTYPES.items() if value == dtype)
    path = linear_path(features, dtype)
    if path is LinearPath.BF16_STRIPS:
        return ["bfloat16, strips, `vdpbf16ps`", *(_counted(panel_sizes(rows, features)) for rows in ROWS)]
    if path is LinearPath.ONEDNN:
        return [f"{name}, oneDNN", *["its own choice"] * len(ROWS)]
    return [f"{name}, {path.value}", *(_counted(panel_sizes(rows, features)) for rows in ROWS)]


def _counted(sizes: list[int]) -> str:
    if sizes == [1]:
        return "1 row x 4 strips"
    return " + ".join(f"{sizes.count(size)} x {size}" for size in sorted(set(sizes), reverse=True))


def integer_row(precision: str, features: CpuFeatures) -> list[str]:
    blocks = [f"1 row x {INTEGER_STRIPS} strips" if rows < INTEGER_ROWS else f"{rows // INTEGER_ROWS} x {INTEGER_ROWS}" for rows in ROWS]
    return [integer_arithmetic(precision, features), *blocks]


def markdown() -> str:
    lines = ["| weights | CPU | arithmetic, path | " + " | ".join(f"{rows} row{'s' * (rows > 1)}" for rows in ROWS) + " |"]
    lines.append("|---" * (3 + len(ROWS)) + "|")
    for weights in ("float32", "bfloat16", "int8", "int4"):
        cpus: dict[tuple[str, ...], list[str]] = {}
        for cpu, features in CPUS.items():
            cells = integer_row(weights, features) if weights.startswith("int") else float_row(weights, features)
            cpus.setdefault(tuple(cells), []).append(cpu)
        lines += [f"| {weights} | {'; '.join(alike)} | " + " | ".join(cells) + " |" for cells, alike in cpus.items()]
    return "\n".join(lines)


if __name__ == "__main__":
    replace_block(PAGE, BLOCK_NAME, markdown())
