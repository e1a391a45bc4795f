"""Tests the choices per family of CPUs, on any machine: dtypes, the path of linears, whether decode steps are recorded."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path

import pytest
import torch
from cpu_families import AMX_BF16, ARM, ARM_BF16, AVX2, AVX2_VNNI, AVX512, AVX512_BF16, AVX512_VNNI, GENERIC
from runner_kit import Planner, row_tokens

pytest.importorskip("numba")

from headrace.engine.config import EngineConfig
from headrace.engine.runner.build import build_runner
from headrace.engine.runner.model_runner import ModelRunner
from headrace.tensor.host.cpu_features import CpuFeatures
from headrace.tensor.kernels.cpu.backend import OutsideLinear
from headrace.tensor.kernels.cpu.integer.quantized import IntegerLinear
from headrace.tensor.kernels.cpu.linear import OneDnnLinear, StripLinear
from headrace.tensor.models.decoder import DecoderModel

pytestmark = pytest.mark.pure

LIBRARY: frozenset[type[object]] = frozenset({OneDnnLinear, OutsideLinear})
"""oneDNN, or torch where this machine's oneDNN does not take the dtype; neither is recorded."""
INTEGERS: frozenset[type[object]] = frozenset({IntegerLinear})
STRIPS: frozenset[type[object]] = frozenset({StripLinear})


@dataclass(frozen=True)
class Choice:
    """stored: what the checkpoint holds; recorded: whether its decode steps are; products: of strips; asked: the option dtype."""

    cpus: tuple[CpuFeatures, ...]
    stored: str
    quantization: str
    dtype: str
    kv_dtype: str
    linears: frozenset[type[object]]
    recorded: bool
    products: torch.dtype = torch.float32
    asked: str = "auto"


WITHOUT_BF16 = (AVX2, AVX2_VNNI, AVX512, AVX512_VNNI)
BY_LIBRARY = (AMX_BF16, ARM_BF16)
WITH_BF16 = (AVX512_BF16, *BY_LIBRARY)
NEITHER = (GENERIC, ARM)
TABLE = (
    Choice(WITHOUT_BF16, "float32", "none", "float32", "float32", STRIPS, recorded=True),
    Choice(WITHOUT_BF16, "bfloat16", "none", "float32", "float32", STRIPS, recorded=True),
    Choice(WITHOUT_BF16, "float16", "none", "float32", "float32", STRIPS, recorded=True),
    Choice(WITHOUT_BF16, "bfloat16", "int8", "float32", "float32", INTEGERS, recorded=True),
    Choice(WITHOUT_BF16, "bfloat16", "int4", "float32", "float32", INTEGERS, recorded=True),
    Choice(WITH_BF16, "float32", "none", "float32", "float32", STRIPS, recorded=True),
    Choice((AVX512_BF16,), "bfloat16", "none", "bfloat16", "bfloat16", STRIPS, recorded=True, products=torch.bfloat16),
    Choice(BY_LIBRARY, "bfloat16", "none", "bfloat16", "bfloat16", LIBRARY, recorded=False),
    Choice(WITH_BF16, "float16", "none", "float32", "float32", STRIPS, recorded=True),
    Choice(WITH_BF16, "bfloat16", "int8", "float32", "bfloat16", INTEGERS, recorded=True),
    Choice(WITH_BF16, "bfloat16", "int4", "float32", "bfloat16", INTEGERS, recorded=True),
    Choice(WITH_BF16, "bfloat16", "none", "float32", "float32", STRIPS, recorded=True, asked="float32"),
    Choice((AVX512_BF16,), "float32", "none", "bfloat16", "bfloat16", STRIPS, recorded=True, products=torch.bfloat16, asked="bfloat16"),
    Choice((AVX512_BF16,), "bfloat16", "int8", "bfloat16", "bfloat16", INTEGERS, recorded=True, asked="bfloat16"),
    Choice(NEITHER, "float32", "none", "float32", "float32", LIBRARY, recorded=False),
    Choice(NEITHER, "bfloat16", "none", "float32", "float32", LIBRARY, recorded=False),
    Choice(NEITHER, "bfloat16", "int8", "float32", "float32", INTEGERS, recorded=True),
)
CASES = [
    pytest.param(cpu, choice, id=f"{cpu.machine}-{'+'.join(sorted(cpu.flags))}-{choice.stored}-{choice.quantization}-{choice.asked}")
    for choice in TABLE
    for cpu in choice.cpus
]


def folder_of(stored: str, tiny: Path, target: Path) -> Path:
    """The tiny Llama's configuration, its heads and layers wide enough for every register; its weights are made up when it is loaded."""
    settings = json.loads((tiny / "config.json").read_text()) | {"dtype": stored, "head_dim": 32, "intermediate_size": 64}
    (target / "config.json").write_text(json.dumps(settings))
    return target


@pytest.mark.parametrize(("cpu", "choice"), CASES)
def test_what_is_chosen_on_a_family_of_cpus(cpu: CpuFeatures, choice: Choice, tiny_folder: Path, tmp_path: Path) -> None:
    asked = EngineConfig(
        model=str(folder_of(choice.stored, tiny_folder, tmp_path)), kernels="numba", quantization=choice.quantization,
        dtype=choice.asked, load_format="dummy", max_num_seqs=2, max_num_batched_tokens=32, num_kv_blocks=8,
    ).checked()  # fmt: skip
    runner, info = build_runner(asked, features=cpu)
    assert isinstance(runner, ModelRunner)
    planner = Planner(block_size=16)
    planner.start(0, [5, 6, 7])
    plans = [planner.plan((0, 0, 3, 1)), *(planner.plan((0, 3 + step, 1, 1)) for step in range(3))]
    tokens = [row_tokens(runner.submit(plan).result()) for plan in plans]
    assert [len(row) for (row,) in tokens] == [1] * 4

    decided = dict(line.split(": ", 1) for line in info.decided)
    assert (info.dtype, decided["KV dtype"].split(",")[0]) == (choice.dtype, choice.kv_dtype)
    model = runner.model
    assert isinstance(model, DecoderModel)
    layers = [linear for block in model.blocks for linear in (*block.attention.linears, *block.mlp.linears)]
    assert {type(linear) for linear in (*layers, model.head)} <= choice.linears
    assert {linear.products for linear in layers if isinstance(linear, StripLinear)} <= {choice.products}
    assert bool(model._steps._kept) == choice.recorded


def test_every_stored_dtype_has_a_row_for_every_cpu() -> None:
    everyone = {*WITHOUT_BF16, *WITH_BF16, *NEITHER}
    for stored, quantization in (("float32", "none"), ("bfloat16", "none"), ("bfloat16", "int8")):
        of_kind = [choice for choice in TABLE if (choice.stored, choice.quantization, choice.asked) == (stored, quantization, "auto")]
        rows = [cpu for choice in of_kind for cpu in choice.cpus]
        assert len(rows) == len(everyone), (stored, quantization)
        assert set(rows) == everyone
