"""Tests a device's whole step over the GPU's kernels, compiled ahead of time: a captured part neither waits for the device nor reads from
it.

The tensors are of the meta device, on which either fails.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

pytest.importorskip("triton")

from ahead_of_time import compiling_for
from device_kit import HostLaunches

from headrace.engine.runner.device.steps import DeviceSteps
from headrace.tensor.batch import allocate_kv
from headrace.tensor.checkpoint.config import read_config
from headrace.tensor.checkpoint.random_weights import WeightShapes
from headrace.tensor.device import META
from headrace.tensor.kernels import Backend
from headrace.tensor.kernels.choice import CHOICE_KINDS
from headrace.tensor.kernels.gpu.backend import TritonKernels
from headrace.tensor.kernels.gpu.choice import TritonChoice
from headrace.tensor.kernels.gpu.linears import TritonPacking
from headrace.tensor.kernels.gpu.tuning import read_tuning
from headrace.tensor.kernels.rounding import Precision
from headrace.tensor.layers.weights import WeightReader
from headrace.tensor.models import ARCHITECTURES
from headrace.tensor.models.decoder import DecoderModel

pytestmark = [pytest.mark.slow, pytest.mark.process]

CONFIG: dict[str, Any] = {
    "architectures": ["LlamaForCausalLM"], "hidden_size": 1024, "intermediate_size": 2048, "num_attention_heads": 8,
    "num_key_value_heads": 2, "num_hidden_layers": 2, "vocab_size": 32000, "max_position_embeddings": 4096, "rms_norm_eps": 1e-5,
    "rope_theta": 10000.0, "torch_dtype": "bfloat16",
}  # fmt: skip
MAX_ROWS = 24


def read_model(folder: Path) -> DecoderModel:
    (folder / "config.json").write_text(json.dumps(CONFIG), encoding="utf-8")
    tuning = read_tuning()
    backend = Backend(name="triton", kernels=TritonKernels(tuning), packing=TritonPacking(tuning))
    reader = WeightReader(WeightShapes(torch.bfloat16), backend, torch.bfloat16, META, precision=Precision("none"))
    return DecoderModel(reader, ARCHITECTURES["LlamaForCausalLM"](read_config(folder)))


def test_a_captured_step_runs_over_tensors_without_values_and_compiles_nothing_later(tmp_path: Path) -> None:
    with compiling_for(90, tmp_path) as compiled, torch.inference_mode():
        model = read_model(tmp_path)
        kv = allocate_kv(model.kv_shapes, model.group_of, (64,), 16, torch.bfloat16, META)
        steps = DeviceSteps(
            model, kv, TritonChoice(), HostLaunches(), max_num_seqs=MAX_ROWS, most_tokens=256, table_shape=(1, 257), max_ends=65,
            device="meta",
        )  # fmt: skip
        steps.capture()
        num_captured = len(compiled)
        for count in range(1, MAX_ROWS + 1):
            steps.send(steps.new_inputs())
            steps.decode(count)
            for kind in CHOICE_KINDS:
                steps.choose(count, kind)
        steps.send_masks(np.zeros((3, 1000), dtype=np.uint32))
        steps.write_tables()
        assert num_captured > 20
        assert compiled[num_captured:] == []
