"""Tests every architecture's GGUF file against the same weights in the Hugging Face layout: configuration, names, order of rows."""

from __future__ import annotations

import json
import math
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from cpu_families import AVX2
from gguf_files import dense, entry, gguf_bytes, model_keys, stored_tensors
from quantized_kit import load, logits
from rank_kit import Ranks
from tiny_models import save_tiny_model
from torch import Tensor

from headrace.core.errors import CheckpointError
from headrace.core.parallelism import Parallelism
from headrace.tensor.backends import load_backend
from headrace.tensor.checkpoint.config import read_config
from headrace.tensor.checkpoint.gguf.checkpoint import GgufCheckpoint
from headrace.tensor.checkpoint.gguf.folder import make_folder
from headrace.tensor.device import CPU
from headrace.tensor.kernels.rounding import Precision
from headrace.tensor.layers.rope import rope_table
from headrace.tensor.layers.weights import WeightReader
from headrace.tensor.models import ARCHITECTURES
from headrace.tensor.models.decoder import DecoderModel
from headrace.tensor.models.spec import DecoderSpec

pytestmark = pytest.mark.pure

VOCABULARY = [chr(0x100 + number) for number in range(500)]
TEXT: dict[str, object] = {
    "tokenizer.ggml.model": "gpt2",
    "tokenizer.ggml.pre": "gpt-2",
    "tokenizer.ggml.tokens": VOCABULARY,
    "tokenizer.ggml.eos_token_id": 2,
}
MODELS: dict[str, tuple[str, str, dict[str, Any]]] = {
    "llama": ("llama", "llama", {"mlp_bias": False}),
    "mistral": ("mistral", "llama", {}),
    "mixtral": ("mixtral", "llama", {}),
    "qwen2": ("qwen2", "qwen2", {"use_sliding_window": False, "sliding_window": None}),
    "qwen3": ("qwen3", "qwen3", {}),
    "qwen3moe": ("qwen3-moe", "qwen3moe", {"mlp_only_layers": []}),
    "gemma3": ("gemma3", "gemma3", {"query_pre_attn_scalar": 16, "layer_types": None, "tie_word_embeddings": True}),
    "phi3": ("phi3", "phi3", {"sliding_window": None}),
}
"""Name -> (name in tiny_models, arch in the file, fields that a file cannot say)."""


class Asked:
    """Random weights; remembers every tensor that a model asks for."""

    def __init__(self) -> None:
        self.tensors: dict[str, Tensor] = {}
        self._generator = torch.Generator().manual_seed(0)

    def has(self, name: str) -> bool:
        return False

    def expect(self, name: str, shape: tuple[int, ...]) -> None:
        raise AssertionError("without a store every tensor is read")

    def read(self, name: str, shape: tuple[int, ...], region: tuple[slice, ...] = ()) -> Tensor:
        if name not in self.tensors:
            self.tensors[name] = torch.randn(shape, generator=self._generator)
        return self.tensors[name][region]


def tiny_model(tmp_path: Path, name: str, **changes: Any) -> tuple[dict[str, Any], DecoderSpec, dict[str, Tensor]]:
    """(config.json, what it describes, all weights)."""
    tiny, _, fields = MODELS[name]
    folder = save_tiny_model(tiny, tmp_path / "hf", **fields, **changes)
    config = json.loads((folder / "config.json").read_text())
    spec = ARCHITECTURES[config["architectures"][0]](read_config(folder))
    asked = Asked()
    DecoderModel(WeightReader(asked, load_backend("reference"), torch.float32, CPU), spec)
    return config, spec, asked.tensors


def write(tmp_path: Path, keys: dict[str, object], tensors: dict[str, Tensor], kind: str) -> Path:
    path = tmp_path / "model.gguf"
    path.write_bytes(gguf_bytes(keys, {name: entry(tensor, kind) for name, tensor in tensors.items()}))
    return path


@pytest.mark.parametrize(
    ("name", "kind"), [*((name, "F16") for name in MODELS), ("llama", "F32"), ("llama", "BF16"), ("mixtral", "Q8_0"), ("qwen3moe", "Q8_0")]
)
def test_a_file_is_the_model_that_it_was_made_from(tmp_path: Path, name: str, kind: str) -> None:
    config, spec, tensors = tiny_model(tmp_path, name)
    arch = MODELS[name][1]
    keys = {**model_keys(config, arch), **TEXT}
    folder = make_folder(write(tmp_path, keys, stored_tensors(config, tensors, arch), kind))
    made = read_config(folder)
    assert ARCHITECTURES[made.items("architectures")[0]](made) == spec  # type: ignore[index]
    checkpoint = GgufCheckpoint(folder)
    for wanted_name, tensor in tensors.items():
        shape = tuple(tensor.shape)
        rounded = tensor if name == "gemma3" and len(shape) == 1 else dense(tensor, kind)
        tolerance = 2e-7 if name == "gemma3" and len(shape) == 1 else 0.0  # w + 1 - 1
        found = checkpoint.read(wanted_name, shape)
        torch.testing.assert_close(found.float(), rounded, rtol=tolerance, atol=tolerance)
        some = (slice(shape[0] // 3, shape[0] // 2 + 1), slice(3, 40))[: len(shape)]
        assert torch.equal(checkpoint.read(wanted_name, shape, some), found[some])
    checkpoint.check_all_read()


@pytest.mark.parametrize("name", ["llama", "mixtral"])
@pytest.mark.parametrize("kind", ["Q4_0", "Q8_0", "F16"])
def test_linears_are_given_in_the_bits_in_which_they_are_stored(tmp_path: Path, name: str, kind: str) -> None:
    """Rows of whole and of parts of heads, whose order the file changes, and of experts, which it stacks."""
    config, _, tensors = tiny_model(tmp_path, name)
    keys = {**model_keys(config, "llama"), **TEXT}
    checkpoint = GgufCheckpoint(make_folder(write(tmp_path, keys, stored_tensors(config, tensors, "llama"), kind)))
    matrices = {name: tensor for name, tensor in tensors.items() if tensor.dim() == 2 and "gate.weight" not in name}
    for wanted_name, tensor in matrices.items():
        rows = slice(tensor.shape[0] // 3, tensor.shape[0] // 2 + 1)
        found = checkpoint.rounded(wanted_name, tuple(tensor.shape), rows)
        assert (found is not None) == (kind == "Q4_0")
        assert checkpoint.precision_of(wanted_name) is {"Q4_0": Precision.INT4, "Q8_0": Precision.INT8, "F16": Precision.NONE}[kind]
        if found is not None:
            assert torch.equal(found.dense(), dense(tensor, kind)[rows])
            assert found.zeros is None


@pytest.mark.socket
@pytest.mark.parametrize("name", ["llama", "mixtral"])
def test_ranks_hold_parts_of_blocks_as_they_are_stored(tmp_path: Path, name: str) -> None:
    config, _, tensors = tiny_model(tmp_path, name)
    keys = {**model_keys(config, "llama"), **TEXT}
    folder = make_folder(write(tmp_path, keys, stored_tensors(config, tensors, "llama"), "Q4_0"))
    exact = partial(load, folder)
    found, wanted = Ranks(Parallelism(2), exact).run(logits)[0], logits(exact())
    assert (found - wanted).abs().max() <= 1e-5 * wanted.abs().max()
    few_bits = partial(load, folder, backend=load_backend("numba", features=AVX2))
    whole, ranks = few_bits(), Ranks(Parallelism(2), few_bits).loaded
    assert [rank.held for rank in ranks] == [whole.held] * 2
    outputs = [loaded.model.blocks[0].attention.output for loaded in (whole, *ranks)]
    x = torch.randn(5, outputs[0].in_features)
    first, second = (output(part.contiguous()) for output, part in zip(outputs[1:], x.chunk(2, dim=1), strict=True))
    wanted = outputs[0](x)
    assert (first + second - wanted).abs().max() <= 0.02 * wanted.abs().max(), "but for the rounding of inputs, by the row"


def test_zero_points_follow_the_rows_of_heads(tmp_path: Path) -> None:
    """Blocks with a minimum, of a linear whose rows the file permutes."""
    config, _, tensors = tiny_model(tmp_path, "llama")
    name = "model.layers.0.self_attn.q_proj.weight"
    shape = tuple(tensors[name].shape)
    stored = {key: entry(tensor, "F16") for key, tensor in stored_tensors(config, tensors, "llama").items()}
    rng = np.random.default_rng(5)
    blocks = rng.integers(0, 256, (shape[0] * shape[1] // 32, 20), dtype=np.uint8)
    blocks[:, :4] = rng.normal(size=(len(blocks), 2)).astype("<f2").view(np.uint8)
    stored["blk.0.attn_q.weight"] = ("Q4_1", shape, blocks.tobytes())
    path = tmp_path / "model.gguf"
    path.write_bytes(gguf_bytes({**model_keys(config, "llama"), **TEXT}, stored))
    checkpoint = GgufCheckpoint(make_folder(path))
    for rows in (slice(None), slice(5, 23)):
        found, wanted = checkpoint.rounded(name, shape, rows), checkpoint.read(name, shape, (rows,))
        assert found is not None
        torch.testing.assert_close(found.dense(), wanted, rtol=0, atol=2e-3 * float(wanted.abs().max()))


@pytest.mark.parametrize("name", ["mixtral", "qwen3moe"])
def test_experts_of_older_files_are_tensors_of_their_own(tmp_path: Path, name: str) -> None:
    config, _, tensors = tiny_model(tmp_path, name)
    arch = MODELS[name][1]
    stored = stored_tensors(config, tensors, arch)
    for name in [name for name in stored if "_exps" in name]:
        for index, expert in enumerate(stored.pop(name)):
            stored[name.replace("_exps.", f".{index}.")] = expert
    checkpoint = GgufCheckpoint(make_folder(write(tmp_path, {**model_keys(config, arch), **TEXT}, stored, "Q8_0")))
    for name, tensor in tensors.items():
        assert torch.equal(checkpoint.read(name, tuple(tensor.shape)), dense(tensor, "Q8_0"))
    checkpoint.check_all_read()


def test_experts_whose_size_a_file_leaves_out_share_the_whole_width(tmp_path: Path) -> None:
    config, _, tensors = tiny_model(tmp_path, "qwen3moe", intermediate_size=192, moe_intermediate_size=64)
    keys = {**model_keys(config, "qwen3moe"), **TEXT}
    del keys["qwen3moe.expert_feed_forward_length"]
    made = read_config(make_folder(write(tmp_path, keys, stored_tensors(config, tensors, "qwen3moe"), "F16")))
    assert made.values["moe_intermediate_size"] == 64


def test_factors_of_rotation_are_llama3s_scaling(tmp_path: Path) -> None:
    """A file has no fields of this scaling, but what each pair's frequency is divided by."""
    scaling = {"rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0}
    scaling["original_max_position_embeddings"] = 256
    config, spec, tensors = tiny_model(tmp_path, "llama", rope_scaling=scaling)
    factors = []
    for pair in range(8):
        turns = 256 / (2 * math.pi * 1e4 ** (pair / 8))
        smooth = min(1.0, max(0.0, (turns - 1.0) / (4.0 - 1.0)))
        factors.append(1 / ((1 - smooth) / 8.0 + smooth))
    stored = {**stored_tensors(config, tensors, "llama"), "rope_freqs.weight": torch.tensor(factors)}
    folder = make_folder(write(tmp_path, {**model_keys(config, "llama"), **TEXT}, stored, "F32"))
    made = ARCHITECTURES["LlamaForCausalLM"](read_config(folder))
    tables = [rope_table(each.layers[0].attention.rope, 512, "cpu") for each in (spec, made)]
    torch.testing.assert_close(tables[1], tables[0], rtol=1e-4, atol=1e-4)
    assert made.max_positions == spec.max_positions
    assert made.longrope is None  # the start's log names no choice


@pytest.mark.parametrize(
    ("name", "added", "scaling"),
    [
        ("qwen2", {"type": "yarn", "factor": 4.0, "original_context_length": 512},
         {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 512}),
        ("llama", {"type": "yarn", "factor": 4.0, "attn_factor": 0.875, "yarn_beta_fast": 16.0, "yarn_beta_slow": 2.0},
         {"rope_type": "yarn", "factor": 4.0, "attn_factor": 0.875, "beta_fast": 16.0, "beta_slow": 2.0}),
        ("llama", {"type": "linear", "factor": 2.0}, {"rope_type": "linear", "factor": 2.0}),
        ("llama", {"factor": 2.0}, {"rope_type": "linear", "factor": 2.0}),
        ("gemma3", {"type": "linear", "factor": 8.0}, {"rope_type": "linear", "factor": 8.0}),
    ],
)  # fmt: skip
def test_scaling_is_that_of_the_keys(tmp_path: Path, name: str, added: dict[str, object], scaling: dict[str, object]) -> None:
    config, spec, tensors = tiny_model(tmp_path, name, rope_scaling=scaling)
    arch = MODELS[name][1]
    keys = {**model_keys(config, arch), **{f"{arch}.rope.scaling.{key}": value for key, value in added.items()}, **TEXT}
    made = read_config(make_folder(write(tmp_path, keys, stored_tensors(config, tensors, arch), "F16")))
    assert ARCHITECTURES[config["architectures"][0]](made) == spec


def test_a_vector_of_longrope_becomes_phi3s_factors(tmp_path: Path) -> None:
    factors = [1.0 + number / 4 for number in range(8)]
    scaling = {"rope_type": "longrope", "short_factor": factors, "long_factor": [2 * factor for factor in factors], "attention_factor": 1.5}
    config, spec, tensors = tiny_model(tmp_path, "phi3", rope_scaling=scaling, original_max_position_embeddings=1024)
    stored = stored_tensors(config, tensors, "phi3")
    stored |= {"rope_factors_short.weight": torch.tensor(factors), "rope_factors_long.weight": 2 * torch.tensor(factors)}
    keys = {"phi3.rope.scaling.original_context_length": 1024, "phi3.rope.scaling.attn_factor": 1.5}
    folder = make_folder(write(tmp_path, {**model_keys(config, "phi3"), **keys, **TEXT}, stored, "Q8_0"))
    assert ARCHITECTURES["Phi3ForCausalLM"](read_config(folder)) == spec


@pytest.mark.parametrize(
    ("changes", "named"),
    [
        ({"general.architecture": "deepseek2"}, 'general.architecture = "deepseek2": is not supported. Supported: llama'),
        ({"llama.attention.head_count_kv": [2, 1]}, "head_count_kv.*differs from layer to layer"),
        ({"llama.attention.value_length": 8}, "value_length"),
        ({"llama.block_count": None}, "llama.block_count: is missing"),
        ({"llama.rope.scaling.type": "su"}, "only linear and yarn"),
        ({"llama.rope.scaling.yarn_ext_factor": 0.5}, "yarn_ext_factor.*is not supported"),
        ({"llama.rope.scaling.yarn_log_multiplier": 0.1}, "yarn_log_multiplier.*is not supported"),
        ({"llama.expert_gating_func": 2}, "expert_gating_func.*is not supported"),
        ({"llama.expert_group_count": 8}, "expert_group_count.*is not supported"),
        ({"llama.expert_count": 4, "llama.expert_used_count": 2, "llama.expert_weights_norm": False}, "expert_weights_norm.*always sum to"),
        ({"llama.logit_scale": 2.0}, "logit_scale.*is not supported"),
        ({"llama.attention.causal": False}, "attention.causal.*models that see later tokens"),
        ({"llama.pooling_type": 1}, "pooling_type.*is not supported"),
        ({"llama.rope.dimension_count": 8}, "rotates whole heads"),
    ],
)
def test_what_is_not_computed_is_refused_by_name(tmp_path: Path, changes: dict[str, object], named: str) -> None:
    config, _, tensors = tiny_model(tmp_path, "llama")
    keys = {**model_keys(config, "llama"), **TEXT, **changes}
    given = {key: value for key, value in keys.items() if value is not None}
    path = write(tmp_path, given, stored_tensors(config, tensors, "llama"), "F16")
    with pytest.raises(CheckpointError, match=named):
        ARCHITECTURES["LlamaForCausalLM"](read_config(make_folder(path)))


ODD: tuple[object, ...] = (0, 1, 3, -1, 2**31, 0.0, float("nan"), 1e30, "", "x", True, [], [0], ["a"], [0.5])
"""Values that no key should have; a few are right for a few keys."""


@pytest.mark.parametrize("name", ["llama", "mixtral", "qwen3moe", "gemma3", "phi3"])
def test_keys_of_any_value_are_read_or_refused(tmp_path: Path, name: str) -> None:
    config, _, tensors = tiny_model(tmp_path, name)
    arch = MODELS[name][1]
    keys: dict[str, object] = {**model_keys(config, arch), **TEXT, "general.file_type": 7, f"{arch}.rope.scaling.type": "linear"}
    keys |= {f"{arch}.rope.scaling.factor": 2.0, f"{arch}.rope.dimension_count": 16, "tokenizer.ggml.token_type": [1] * 500}
    stored = {stored_name: entry(tensor, "F16") for stored_name, tensor in stored_tensors(config, tensors, arch).items()}
    path, num_refused = tmp_path / "model.gguf", 0
    for key in keys:
        if key == "tokenizer.ggml.tokens" or key.endswith("block_count"):
            continue
        for value in ODD:
            path.write_bytes(gguf_bytes({**keys, key: value}, stored))
            try:
                folder = make_folder(path)
                made = read_config(folder)
                ARCHITECTURES[config["architectures"][0]](made)
                checkpoint = GgufCheckpoint(folder)
                for wanted, tensor in tensors.items():
                    checkpoint.expect(wanted, tuple(tensor.shape))
            except CheckpointError:
                num_refused += 1
    assert num_refused > 5 * len(keys)


def test_tensors_that_are_missing_misshapen_or_left_over_are_refused(tmp_path: Path) -> None:
    config, _, tensors = tiny_model(tmp_path, "llama")
    stored = stored_tensors(config, tensors, "llama")
    keys = {**model_keys(config, "llama"), **TEXT}
    checkpoint = GgufCheckpoint(make_folder(write(tmp_path, keys, {**stored, "blk.0.odd.weight": torch.ones(3)}, "F16")))
    with pytest.raises(CheckpointError, match=r"tensor model.layers.7.mlp.up_proj.weight .*blk.7.ffn_up.weight. is missing"):
        checkpoint.expect("model.layers.7.mlp.up_proj.weight", (320, 128))
    with pytest.raises(CheckpointError, match=r"blk.0.ffn_up.weight has shape"):
        checkpoint.read("model.layers.0.mlp.up_proj.weight", (128, 320))
    for name, tensor in tensors.items():
        checkpoint.expect(name, tuple(tensor.shape))
    with pytest.raises(CheckpointError, match=r"1 tensors this architecture does not have, e.g. .blk.0.odd.weight"):
        checkpoint.check_all_read()


def test_values_that_are_not_finite_are_refused(tmp_path: Path) -> None:
    config, _, tensors = tiny_model(tmp_path, "llama")
    name = "model.layers.1.mlp.down_proj.weight"
    tensors[name][0, 0] = float("nan")
    stored = stored_tensors(config, tensors, "llama")
    checkpoint = GgufCheckpoint(make_folder(write(tmp_path, {**model_keys(config, "llama"), **TEXT}, stored, "F16")))
    with pytest.raises(CheckpointError, match=r"blk.1.ffn_down.weight holds 1 values that are NaN"):
        checkpoint.read(name, tuple(tensors[name].shape))


def test_a_file_that_changed_since_its_folder_was_made_is_refused(tmp_path: Path) -> None:
    config, _, tensors = tiny_model(tmp_path, "llama")
    stored, keys = stored_tensors(config, tensors, "llama"), {**model_keys(config, "llama"), **TEXT}
    folder = make_folder(write(tmp_path, keys, stored, "F16"))
    write(tmp_path, {**keys, "general.name": "another"}, stored, "F16")
    with pytest.raises(CheckpointError, match="has changed since"):
        GgufCheckpoint(folder)


def test_a_folder_elsewhere_names_no_file(tmp_path: Path) -> None:
    """A downloaded folder could otherwise have any file of this machine read."""
    config, _, tensors = tiny_model(tmp_path, "llama")
    made = make_folder(write(tmp_path, {**model_keys(config, "llama"), **TEXT}, stored_tensors(config, tensors, "llama"), "F16"))
    elsewhere = tmp_path / "downloaded"
    elsewhere.mkdir()
    for file in made.iterdir():
        (elsewhere / file.name).write_bytes(file.read_bytes())
    with pytest.raises(CheckpointError, match=r"Give the path of the .gguf file") as caught:
        GgufCheckpoint(elsewhere)
    assert f"does not lie in {tmp_path / 'cache' / 'gguf'}" in str(caught.value)
    assert "If HEADRACE_CACHE_DIR was another one when the folder was made" in str(caught.value)
