"""Tests the sizes of a planned model against the files that are stored, and against the configuration where there are no files yet."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from float_formats_kit import Compressed, Fp8, ModelOpt
from gguf_files import bundled_gguf
from quantized_kit import Awq, Gptq, Stored, save_pair

from headrace.bundled import FOLDER
from headrace.cli.planner.model import PlannedModel, find_model
from headrace.core.errors import CheckpointError
from headrace.tensor.checkpoint.gguf.folder import make_folder
from headrace.tensor.checkpoint.gguf.shards import read_gguf

pytestmark = pytest.mark.pure

LLAMA: dict[str, Any] = {
    "architectures": ["LlamaForCausalLM"], "hidden_size": 4096, "intermediate_size": 14336, "num_hidden_layers": 4,
    "num_attention_heads": 32, "num_key_value_heads": 8, "vocab_size": 32000, "max_position_embeddings": 8192, "torch_dtype": "bfloat16",
}  # fmt: skip
LINEARS = 4 * (2 * 4096 * 4096 + 2 * 4096 * 1024 + 3 * 4096 * 14336)
ATTENTION = 4 * (2 * 4096 * 4096 + 2 * 4096 * 1024)
TABLE = 32000 * 4096


def found_in(folder: Path, config: dict[str, Any], dtype: str | None = None) -> PlannedModel:
    (folder / "config.json").write_text(json.dumps(config))
    return find_model(str(folder), {}, dtype)


def weights_bytes(found: PlannedModel) -> float:
    return found.shape.weights_bytes(found.dtype)


STORED: list[tuple[Stored, str]] = [
    *((Gptq(bits, 32), "int8" if bits == 8 else "int4") for bits in (2, 3, 4, 8)),
    (Gptq(4, 32, desc_act=True), "int4"),
    (Awq(32), "int4"),
    (Fp8(), "fp8"),
    (Fp8((64, 32), "weight_scale_inv"), "fp8"),
    (ModelOpt("FP8"), "fp8"),
    (ModelOpt("NVFP4"), "int4"),
    (Compressed("pack-quantized", 4, (1, 32)), "int4"),
    (Compressed("pack-quantized", 4, (1, 32), symmetric=False), "int4"),
    (Compressed("pack-quantized", 6, (1, 32)), "int8"),
    (Compressed("int-quantized", 4, (1, 32)), "int8"),
    (Compressed("int-quantized", 8, (1, 0)), "int8"),
    (Compressed("float-quantized", 8, (1, 0)), "fp8"),
    (Compressed("nvfp4-pack-quantized", 4, (1, 16)), "int4"),
    (Compressed("mxfp4-pack-quantized", 4, (1, 32)), "int4"),
    (Compressed("mxfp8-quantized", 8, (1, 32)), "fp8"),
]


@pytest.mark.parametrize("architecture", ["Llama", "Phi3"])
@pytest.mark.parametrize(("stored", "dtype"), STORED, ids=lambda value: str(value))
def test_every_format_that_is_served_is_planned_by_its_files_and_without_them(
    stored: Stored, dtype: str, architecture: str, tmp_path: Path
) -> None:
    pair = save_pair(tmp_path, architecture, stored)
    held = sum(tensor.nbytes for tensor in pair.tensors.values())
    found = find_model(str(pair.folder), {})
    assert weights_bytes(found) == pytest.approx(held, rel=1e-6)
    assert found.dtype == dtype
    (pair.folder / "model.safetensors").unlink()
    assert weights_bytes(find_model(str(pair.folder), {})) == pytest.approx(held, rel=0.03)


@pytest.mark.parametrize(("kind", "dtype"), [("Q4_0", "int4"), ("Q8_0", "int8"), ("F16", "fp16"), ("BF16", "bf16"), ("F32", "fp32")])
def test_a_gguf_file_and_its_folder_are_planned_with_the_bytes_of_their_tensors(kind: str, dtype: str, tmp_path: Path) -> None:
    file = bundled_gguf(FOLDER / "headrace-tiny", tmp_path / "some.gguf", kind)
    held = sum(read_gguf(file).tensor_bytes.values())
    for path in (file, make_folder(file)):
        found = find_model(str(path), {})
        assert (found.shape.name, found.dtype) == ("some", dtype)
        assert weights_bytes(found) == pytest.approx(held, rel=1e-6)


def quantized(folder: Path, **section: Any) -> PlannedModel:
    return found_in(folder, {**LLAMA, "quantization_config": section})


def test_linears_that_the_configuration_leaves_plain_have_16_bits(tmp_path: Path) -> None:
    fp8 = {"quant_method": "fp8"}
    everywhere = weights_bytes(quantized(tmp_path, **fp8))
    assert everywhere == pytest.approx(LINEARS + 2 * 2 * TABLE, rel=0.002)
    for lists in (
        {**fp8, "modules_to_not_convert": ["self_attn"]},
        {**fp8, "ignored_layers": [f"model.layers.{layer}.self_attn" for layer in range(4)]},
        {"quant_method": "modelopt", "quant_algo": "FP8", "exclude_modules": ["lm_head", "*.self_attn*"]},
        {"quant_method": "modelopt", "quantization": {"quant_algo": "FP8", "exclude_modules": ["*.self_attn.*"]}},
    ):
        assert weights_bytes(quantized(tmp_path, **lists)) == pytest.approx(everywhere + ATTENTION, rel=0.002)
    gptq = {"quant_method": "gptq", "bits": 8, "group_size": 128}
    added = weights_bytes(quantized(tmp_path, **gptq, dynamic={r"-:.*self_attn.*": {}})) - weights_bytes(quantized(tmp_path, **gptq))
    assert added == pytest.approx(ATTENTION, rel=0.03)


def scheme(targets: list[str], layout: str, **weights: Any) -> dict[str, Any]:
    return {"targets": targets, "format": layout, "weights": {"symmetric": True, **weights}}


def test_groups_of_one_checkpoint_have_sizes_of_their_own(tmp_path: Path) -> None:
    groups = {
        "a": scheme(["re:.*self_attn.*"], "float-quantized", num_bits=8, type="float", strategy="channel"),
        "b": scheme(["Linear"], "pack-quantized", num_bits=4, type="int", strategy="group", group_size=128),
    }
    section = {"quant_method": "compressed-tensors", "format": "mixed-precision", "config_groups": groups, "ignore": ["re:lm_h.*"]}
    wanted = ATTENTION + (LINEARS - ATTENTION) * (4 + 16 / 128) / 8 + 2 * 2 * TABLE
    assert weights_bytes(quantized(tmp_path, **section)) == pytest.approx(wanted, rel=0.002)
    with_head = wanted - 2 * TABLE + TABLE * (4 + 16 / 128) / 8
    assert weights_bytes(quantized(tmp_path, **{**section, "ignore": []})) == pytest.approx(with_head, rel=0.002)


def test_a_head_is_quantized_where_its_exporter_says_so(tmp_path: Path) -> None:
    section = {"quant_method": "gptq", "bits": 8, "group_size": -1}
    saved = weights_bytes(quantized(tmp_path, **section)) - weights_bytes(quantized(tmp_path, **section, lm_head=True))
    assert saved == pytest.approx(TABLE, rel=0.01)


@pytest.mark.parametrize("dtype", ["fp8", "int8", "int4"])
def test_a_dtype_that_is_asked_for_leaves_the_tables_in_16_bits(dtype: str, tmp_path: Path) -> None:
    found = found_in(tmp_path, {**LLAMA, "quantization_config": {"quant_method": "magic"}}, dtype)
    least = 2 * 2 * TABLE + LINEARS * {"fp8": 1, "int8": 1, "int4": 0.5}[dtype]
    assert least < weights_bytes(found) < 1.03 * least


def test_a_format_that_the_engine_refuses_is_refused_with_its_words(tmp_path: Path) -> None:
    for section, named in (
        ({"quant_method": "magic"}, "checkpoints of this format are not supported"),
        ({"quant_method": "gptq", "bits": 5, "group_size": 128}, "bits = 5"),
        ({"quant_method": "awq", "bits": 4, "group_size": 128, "version": "gemv"}, "version"),
    ):
        with pytest.raises(CheckpointError, match=named):
            quantized(tmp_path, **section)


def test_weights_that_stay_in_more_bits_are_named(tmp_path: Path) -> None:
    found = quantized(tmp_path, quant_method="modelopt", quant_algo="NVFP4")
    assert "Headrace holds most of these weights in 16 bits, which are 4.5 in the files." in found.notes
    assert quantized(tmp_path, quant_method="awq", bits=4, group_size=128).notes == ()


def test_shards_that_are_missing_are_named_and_the_configuration_counts(tmp_path: Path) -> None:
    pair = save_pair(tmp_path, "Llama", Gptq(4, 32))
    (pair.folder / "model.safetensors").rename(pair.folder / "other.safetensors")
    (pair.folder / "model.safetensors.index.json").write_text('{"weight_map": {"lm_head.weight": "model-00001-of-00002.safetensors"}}')
    found = find_model(str(pair.folder), {})
    assert weights_bytes(found) == pytest.approx(sum(tensor.nbytes for tensor in pair.tensors.values()), rel=0.03)
    assert "The weights cannot be read" in found.notes[0]


GEMMA_4B = {"hidden_size": 2560, "intermediate_size": 10240, "model_type": "gemma3_text", "num_hidden_layers": 34, "sliding_window": 1024}


def test_a_text_model_inside_a_larger_one_has_the_defaults_of_its_family(tmp_path: Path) -> None:
    """Google's own file of the 4B, which names neither heads nor vocabulary."""
    config = {
        "architectures": ["Gemma3ForConditionalGeneration"],
        "model_type": "gemma3",
        "text_config": GEMMA_4B,
        "torch_dtype": "bfloat16",
    }
    found = found_in(tmp_path, config)
    shape = found.shape
    assert (shape.heads, shape.kv_heads, shape.head_dim, shape.vocab_size, shape.max_positions) == (8, 4, 256, 262_208, 131_072)
    assert (shape.window, shape.num_window_layers, shape.is_tied, found.dtype) == (1024, 29, True, "bf16")
    assert shape.num_params == pytest.approx(3.88e9, rel=0.01)
    assert found.notes[0].startswith('Headrace does not serve this model: architecture "Gemma3ForConditionalGeneration" is not supported')
    with pytest.raises(CheckpointError, match="is_encoder_decoder = true: only layers of attention"):
        found_in(tmp_path, config | {"is_encoder_decoder": True})
    quantized = found_in(tmp_path, config | {"quantization_config": {"quant_method": "fp8"}})
    assert quantized.shape.weights_bytes("fp8") == pytest.approx(shape.num_layer_params + 2 * shape.num_table_params, rel=0.01)


@pytest.mark.parametrize(
    ("fields", "window", "num_window_layers"),
    [
        ({"architectures": ["MistralForCausalLM"]}, 4096, 4),
        ({"architectures": ["MistralForCausalLM"], "sliding_window": None}, 0, 0),
        ({"architectures": ["LlamaForCausalLM"], "sliding_window": 64}, 0, 0),
        ({"architectures": ["Qwen2ForCausalLM"], "sliding_window": 64}, 0, 0),
        ({"architectures": ["Qwen2ForCausalLM"], "sliding_window": 64, "use_sliding_window": True, "max_window_layers": 1}, 64, 3),
        ({"architectures": ["Gemma3ForCausalLM"], "sliding_window": 64, "sliding_window_pattern": 2}, 64, 2),
    ],
)
def test_windows_are_those_that_are_served(fields: dict[str, Any], window: int, num_window_layers: int, tmp_path: Path) -> None:
    shape = found_in(tmp_path, LLAMA | fields).shape
    assert (shape.window, shape.num_window_layers) == (window, num_window_layers)


def test_experts_in_some_layers_alone_are_planned_where_they_are_served(tmp_path: Path) -> None:
    experts = {"num_experts": 8, "num_experts_per_tok": 2, "moe_intermediate_size": 512, "mlp_only_layers": [0]}
    shape = found_in(tmp_path, {**LLAMA, "architectures": ["Qwen3MoeForCausalLM"], **experts}).shape
    assert (shape.num_experts, shape.experts_per_token, shape.num_dense_layers, shape.mlp_size) == (8, 2, 1, 14336)
    assert shape.num_layer_params == pytest.approx(ATTENTION + 3 * 4096 * (14336 + 3 * 8 * 512), rel=1e-3)


def test_an_architecture_that_is_not_served_is_planned_and_said_to_be(tmp_path: Path) -> None:
    config = {**LLAMA, "architectures": ["OlmoForCausalLM"], "model_type": "olmo", "quantization_config": {"quant_method": "fp8"}}
    found = found_in(tmp_path, config)
    assert weights_bytes(found) == pytest.approx(LINEARS + 2 * 2 * TABLE, rel=0.002)
    assert found.notes == ('Headrace does not serve this model: architecture "OlmoForCausalLM" is not supported.',)


def test_what_the_engine_refuses_of_an_architecture_that_it_serves_is_refused(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match="dynamic"):
        found_in(tmp_path, LLAMA | {"rope_scaling": {"rope_type": "dynamic", "factor": 2.0}})
