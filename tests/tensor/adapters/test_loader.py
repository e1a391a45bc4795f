"""Tests what of a PEFT folder is loaded, and that all else is refused with file, value and remedy."""

from __future__ import annotations

import json
import math
import os
import random
from collections.abc import Callable
from pathlib import Path
from typing import Any, cast

import pytest
import torch
from safetensors.torch import save, save_file
from torch import Tensor

from headrace.core.errors import CheckpointError
from headrace.tensor.adapters.loader import AdapterLoader
from headrace.tensor.kernels.reference import ADAPTERS, PACKING, PlainAdapter
from headrace.tensor.layers.adapted import ModelAdapters, StoredRows

pytestmark = pytest.mark.pure

HIDDEN, RANK, MAX_RANK = 8, 2, 4
FUSED = [("q_proj", 8), ("k_proj", 4), ("v_proj", 4)]
CONFIG = "adapter_config.json"
WEIGHTS = "adapter_model.safetensors"
Q0 = "model.layers.0.self_attn.q_proj"
V1 = "model.layers.1.self_attn.v_proj"

Config = dict[str, Any]
Tensors = dict[str, Tensor]


def loader(max_rank: int = MAX_RANK) -> AdapterLoader:
    """Of a model of two layers, each with q, k and v as one linear, and o."""
    adapters = ModelAdapters(ADAPTERS)
    for layer in range(2):
        prefix = f"model.layers.{layer}.self_attn"
        fused = [StoredRows(f"{prefix}.{name}", range(rows), (rows, HIDDEN)) for name, rows in FUSED]
        adapters.wrap(PACKING.pack_linear(torch.zeros(16, HIDDEN), None), fused, range(HIDDEN))
        output = StoredRows(f"{prefix}.o_proj", range(HIDDEN), (HIDDEN, HIDDEN))
        adapters.wrap(PACKING.pack_linear(torch.zeros(HIDDEN, HIDDEN), None), [output], range(HIDDEN))
    return AdapterLoader(adapters, max_rank)


def pair(name: str, rows: int, rank: int = RANK, dtype: torch.dtype = torch.float32) -> Tensors:
    generator = torch.Generator().manual_seed(rows)
    down, up = torch.randn(rank, HIDDEN, generator=generator), torch.randn(rows, rank, generator=generator)
    return {f"base_model.model.{name}.lora_A.weight": down.to(dtype), f"base_model.model.{name}.lora_B.weight": up.to(dtype)}


def good() -> tuple[Config, Tensors]:
    config = {"peft_type": "LORA", "task_type": "CAUSAL_LM", "r": RANK, "lora_alpha": 6, "target_modules": ["q_proj", "v_proj"],
              "base_model_name_or_path": "someone/else", "lora_dropout": 0.1, "init_lora_weights": True, "use_dora": False}  # fmt: skip
    return config, {**pair(Q0, 8), **pair(V1, 4)}


def saved(folder: Path, config: Config, tensors: Tensors) -> Path:
    (folder / CONFIG).write_text(json.dumps(config), encoding="utf-8")
    save_file(tensors, folder / WEIGHTS)
    return folder


def loaded(folder: Path) -> PlainAdapter:
    ours = loader()
    return cast("PlainAdapter", ours.load(folder, ours.inspect(folder)))


def test_a_pair_is_an_update_of_the_rows_that_its_weight_has_in_a_fused_linear(tmp_path: Path) -> None:
    config, tensors = good()
    first, second, third, fourth = loaded(saved(tmp_path, config, tensors)).linears
    assert not second
    assert not fourth
    assert (first[0].first_row, third[0].first_row, first[0].scale) == (0, 12, 3.0)
    assert torch.equal(third[0].down, tensors[f"base_model.model.{V1}.lora_A.weight"])
    assert torch.equal(third[0].up, tensors[f"base_model.model.{V1}.lora_B.weight"])


@pytest.mark.parametrize(
    ("fields", "expected"),
    [
        ({}, (3.0, 3.0)),
        ({"lora_alpha": 0.5}, (0.25, 0.25)),
        ({"use_rslora": True}, (6 / math.sqrt(2), 6 / math.sqrt(2))),
        ({"alpha_pattern": {"v_proj": 1}}, (3.0, 0.5)),
        ({"alpha_pattern": {r"layers\.[1-9]\..*": 1, "v_proj": 2}}, (3.0, 0.5)),
        ({"alpha_pattern": {"_proj": 1, r"^model.layers.0.self_attn.q_proj": 1}}, (0.5, 3.0)),
        ({"alpha_pattern": {"q_proj|v_proj": 1}}, (0.5, 0.5)),
        ({"r": 64, "rank_pattern": {"q_proj": RANK, "1.self_attn.v_proj": RANK}}, (3.0, 3.0)),
        ({"target_modules": r".*\.(q|v)_proj"}, (3.0, 3.0)),
        ({"target_modules": r"(?:\bmodel\.layers\.[\d]{1,}\.(?:self_attn|mlp)\.(?:(?:q_proj|v_proj)))"}, (3.0, 3.0)),
        ({"target_modules": "all-linear"}, (3.0, 3.0)),
        ({"target_modules": [Q0, V1, "up_proj"], "exclude_modules": ["up_proj"]}, (3.0, 3.0)),
        ({"layers_to_transform": [0, 1], "layers_pattern": "layers"}, (3.0, 3.0)),
    ],
)  # fmt: skip
def test_scales_and_targets_are_those_of_peft(tmp_path: Path, fields: Config, expected: tuple[float, float]) -> None:
    config, tensors = good()
    first, _, third, _ = loaded(saved(tmp_path, {**config, **fields}, tensors)).linears
    assert (first[0].scale, third[0].scale) == pytest.approx(expected)


def test_what_bfloat16_holds_exactly_is_kept_in_it_and_the_rest_in_float32(tmp_path: Path) -> None:
    config, tensors = good()
    exact = {name: value.bfloat16().float() for name, value in pair(Q0, 8).items()}
    first, _, third, _ = loaded(saved(tmp_path, config, {**tensors, **exact})).linears
    assert (first[0].down.dtype, third[0].up.dtype) == (torch.bfloat16, torch.float32)
    half = pair(V1, 4, dtype=torch.float16)
    _, _, third, _ = loaded(saved(tmp_path, config, {**tensors, **half})).linears
    assert torch.equal(third[0].up, half[f"base_model.model.{V1}.lora_B.weight"].float())


def test_the_largest_adapter_takes_at_most_max_bytes(tmp_path: Path) -> None:
    config, _ = good()
    tensors = {}
    for layer in range(2):
        for name, rows in [*FUSED, ("o_proj", HIDDEN)]:
            tensors.update(pair(f"model.layers.{layer}.self_attn.{name}", rows, MAX_RANK))
    packed = loaded(saved(tmp_path, {**config, "r": MAX_RANK, "target_modules": "all-linear"}, tensors))
    assert packed.num_bytes <= loader().max_bytes


def test_each_byte_of_both_files_is_in_the_digest(tmp_path: Path) -> None:
    config, tensors = good()
    ours, digest = loader(), loader().inspect(saved(tmp_path, config, tensors))
    assert ours.inspect(tmp_path) == digest
    for change in ({**config, "lora_alpha": 7}, tensors), (config, {**tensors, **{name: value * 2 for name, value in pair(V1, 4).items()}}):
        saved(tmp_path, *change)
        assert ours.inspect(tmp_path) != digest
        with pytest.raises(CheckpointError, match="its files have changed since they were inspected"):
            ours.load(tmp_path, digest)


def renamed(tensors: Tensors, old: str, new: str) -> Tensors:
    return {name.replace(old, new): value for name, value in tensors.items()}


def with_value(tensors: Tensors, value: float) -> Tensors:
    tensors[f"base_model.model.{V1}.lora_B.weight"][1, 1] = value
    return tensors


FIELDS: list[tuple[Config, str]] = [
    ({"peft_type": "LOHA"}, "only LORA is computed"),
    ({"peft_type": None}, "peft_type = null: is missing"),
    ({"task_type": "SEQ_CLS"}, "must be CAUSAL_LM"),
    ({"bias": "all"}, "biases of the base"),
    ({"use_dora": True}, "DoRA is not computed. Merge the adapter"),
    ({"lora_bias": True}, "a bias of lora_B"),
    ({"fan_in_fan_out": True}, "stored as"),
    ({"modules_to_save": ["lm_head"]}, "whole modules"),
    ({"target_parameters": ["mlp.experts.gate_up_proj"]}, "bare parameters"),
    ({"trainable_token_indices": [1]}, "embeddings of tokens"),
    ({"layer_replication": [[0, 2]]}, "not replicated"),
    ({"alora_invocation_tokens": [1]}, "activated LoRA"),
    ({"use_qalora": True}, "use_qalora = true: a field that is not known"),
    ({"use_bdlora": {"nblocks": 2}}, "not known here"),
    ({"arrow_config": {"top_k": 3}}, "not known here"),
    ({"kasa_config": {"beta": 1}}, "not known here"),
    ({"monteclora_config": {"a": 1}}, "not known here"),
    ({"velora_config": {"a": 1}}, "not known here"),
    ({"megatron_config": {"a": 1}}, "not known here"),
    ({"of_tomorrow": "on"}, "of_tomorrow = \"on\": a field that is not known"),
    ({"init_lora_weights": "pissa_niter_4"}, "changed base weights. Save it as plain LoRA"),
    ({"r": 0}, "r = 0: must be an integer"),
    ({"lora_alpha": "8"}, "lora_alpha = \"8\": must be a number"),
    ({"use_rslora": 1}, "must be true or false"),
    ({"rank_pattern": {"v_proj": 1}}, f"{V1} has rank 1 by r and rank_pattern, and 2 in"),
    ({"rank_pattern": {"v_proj": "x"}}, "rank_pattern.v_proj"),
    ({"rank_pattern": ["v_proj"]}, "must be an object"),
    ({"alpha_pattern": {"(": 1}}, "is not a regular expression"),
    ({"alpha_pattern": {"q" * 2000: 1}}, "more than 1000 characters"),
    ({"target_modules": "(?:.|.)*!"}, "which target_modules"),  # of which `re` would try 2^30 ways
    ({"alpha_pattern": {"(?<=k)_proj": 1}}, "is not supported"),
    ({"target_modules": None}, "must name the linears"),
    ({"target_modules": "(q"}, "is not a regular expression"),
    ({"target_modules": [1]}, "a list of strings"),
    ({"target_modules": ["q_proj"]}, f"changes {V1}, which target_modules"),
    ({"exclude_modules": ".*v_proj"}, f"changes {V1}, which target_modules"),
    ({"layers_to_transform": 0}, f"changes {V1}, which target_modules"),
    ({"layers_to_transform": [0, 1], "layers_pattern": ["blocks"]}, f"changes {Q0}, which target_modules"),
    ({"layers_to_transform": "0"}, "must be a list"),
    ({"layers_pattern": "layers"}, "must be null where no layers_to_transform"),
    ({"target_modules": ".*", "layers_to_transform": [1]}, "must be null where target_modules is a string"),
]  # fmt: skip


@pytest.mark.parametrize(("fields", "expected"), FIELDS, ids=[f"{'+'.join(fields)}-{n}" for n, (fields, _) in enumerate(FIELDS)])
def test_a_field_that_changes_what_is_computed_is_refused(tmp_path: Path, fields: Config, expected: str) -> None:
    config, tensors = good()
    saved(tmp_path, {**config, **fields}, tensors)
    with pytest.raises(CheckpointError) as refusal:
        loader().inspect(tmp_path)
    assert str(tmp_path / CONFIG) in str(refusal.value)
    assert expected in str(refusal.value)


WRONG: dict[str, tuple[Callable[[Tensors], Tensors], str]] = {
    "none": (lambda _: {}, "no tensors in it"),
    "half a pair": (lambda t: {n: v for n, v in t.items() if f"{Q0}.lora_B" not in n}, f"{Q0}.lora_B.weight is missing"),
    "embedding": (lambda t: {**t, "base_model.model.model.embed_tokens.lora_embedding_A": torch.zeros(2, 8)}, "embeddings have no"),
    "head": (lambda t: {**t, **pair("lm_head", 8)}, "the head has no adapters"),
    "expert": (lambda t: {**t, **pair("model.layers.0.mlp.experts.0.up_proj", 8)}, "experts have no adapters"),
    "DoRA": (lambda t: {**t, f"base_model.model.{Q0}.lora_magnitude_vector": torch.zeros(8)}, "DoRA is not computed"),
    "bias": (lambda t: {**t, f"base_model.model.{Q0}.lora_B.bias": torch.zeros(8)}, "biases are not computed"),
    "saved module": (lambda t: {**t, "base_model.model.model.norm.modules_to_save.weight": torch.zeros(8)}, "whole modules"),
    "third layer": (lambda t: {**t, **pair("model.layers.2.self_attn.q_proj", 8)}, "belongs to no linear of the base model"),
    "name of an adapter": (lambda t: renamed(t, "lora_A.weight", "lora_A.default.weight"), "belongs to no linear"),
    "without prefix": (lambda t: renamed(t, "base_model.model.", ""), "belongs to no linear"),
    "other inputs": (lambda t: {**t, f"base_model.model.{Q0}.lora_A.weight": torch.zeros(2, 9)}, "shape [2, 9], the model makes it [2, 8]"),
    "other outputs": (lambda t: {**t, f"base_model.model.{Q0}.lora_B.weight": torch.zeros(9, 2)}, "trained on this base model"),
    "a number": (lambda t: {**t, f"base_model.model.{Q0}.lora_A.weight": torch.tensor(0.0)}, "has shape []"),
    "rank above the limit": (lambda t: {**t, **pair(Q0, 8, 5)}, "has rank 5, more than max_lora_rank = 4. Raise max_lora_rank."),
    "another rank": (lambda t: {**t, **pair(Q0, 8, 3)}, "has rank 2 by r and rank_pattern, and 3 in"),
    "fewer layers": (lambda t: {n: v for n, v in t.items() if V1 not in n}, "the adapter's own base may have fewer layers"),
    "NaN": (lambda t: with_value(t, math.nan), f"{V1}.lora_B.weight holds 1 values that are NaN or infinite"),
    "infinity": (lambda t: with_value(t, math.inf), "NaN or infinite"),
    "float64": (lambda t: {**t, **pair(Q0, 8, dtype=torch.float64)}, "has dtype F64. Readable are F32, F16, BF16."),
}  # fmt: skip


@pytest.mark.parametrize("case", WRONG)
def test_tensors_that_do_not_fit_the_model_are_refused(tmp_path: Path, case: str) -> None:
    change, expected = WRONG[case]
    config, tensors = good()
    saved(tmp_path, config, change(tensors))
    with pytest.raises(CheckpointError) as refusal:
        loader().inspect(tmp_path)
    assert WEIGHTS in str(refusal.value)
    assert expected in str(refusal.value)


def test_only_two_regular_files_of_the_folder_are_read(tmp_path: Path) -> None:
    def refused(match: str) -> None:
        with pytest.raises(CheckpointError, match=match):
            loader().inspect(tmp_path)

    saved(tmp_path, *good())
    outside = tmp_path.parent / f"{tmp_path.name}-outside"
    (tmp_path / WEIGHTS).rename(outside)
    refused("no such file")
    (tmp_path / "adapter_model.bin").write_bytes(b"")
    refused("pickles are not read")
    (tmp_path / WEIGHTS).symlink_to(outside)
    refused("leads out of the folder")
    (tmp_path / WEIGHTS).unlink()
    os.mkfifo(tmp_path / WEIGHTS)
    refused("not a regular file")
    (tmp_path / CONFIG).unlink()
    os.mkfifo(tmp_path / CONFIG)
    refused("a FIFO, not a regular file")
    with pytest.raises(CheckpointError, match="not a folder"):
        loader().inspect(tmp_path / "nowhere")


@pytest.mark.parametrize("file", [CONFIG, WEIGHTS])
def test_damaged_files_raise_nothing_but_checkpoint_errors(tmp_path: Path, file: str) -> None:
    config, tensors = good()
    texts = {CONFIG: json.dumps({**config, "rank_pattern": {"q_proj": 2}, "layers_to_transform": [0, 1]}).encode(), WEIGHTS: save(tensors)}
    for name, text in texts.items():
        (tmp_path / name).write_bytes(text)
    assert loader().inspect(tmp_path)
    generator, reach = random.Random(file), 8 + int.from_bytes(texts[WEIGHTS][:8], "little") if file == WEIGHTS else len(texts[CONFIG])
    refusals = 0
    for _ in range(400):
        damaged = bytearray(texts[file])
        for _ in range(generator.choice((1, 1, 2, 8))):
            damaged[generator.randrange(reach)] = generator.choice(
                b'0123456789"{}[]:,-.()*+?\\\x00\xff' + bytes([generator.randrange(256)])
            )
        if generator.random() < 0.2:
            del damaged[generator.randrange(len(damaged)) :]
        (tmp_path / file).write_bytes(damaged)
        try:
            loader().inspect(tmp_path)
        except CheckpointError:
            refusals += 1
    assert refusals > 200
