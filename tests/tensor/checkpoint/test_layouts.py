"""Tests the layouts a checkpoint may come in, which all give the same model, and slices of a rank."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from headrace.core.errors import CheckpointError
from headrace.core.parallelism import Parallelism
from headrace.tensor.backends import load_backend
from headrace.tensor.batch import ForwardBatch
from headrace.tensor.checkpoint.folder import Checkpoint
from headrace.tensor.checkpoint.random_weights import RandomWeights
from headrace.tensor.device import CPU
from headrace.tensor.layers.moe import MoeNames, MoeSpec, SparseMoe
from headrace.tensor.layers.weights import Part, WeightReader

pytestmark = pytest.mark.pure

BACKEND = load_backend("reference")


def weights_of(model: Any) -> list[torch.Tensor]:
    """Every weight that took part in loading, in a fixed order."""
    found = [model.embedding.whole(), model.head.weight, model.final_norm.weight]
    for block in model.blocks:
        found += [block.attention.qkv.weight, block.attention.output.weight, block.attention_norm.weight, block.mlp_norm.weight]
        found += [linear.weight for linear in block.mlp.linears]
    return found


def assert_same(first: Any, second: Any) -> None:
    for one, other in zip(weights_of(first), weights_of(second), strict=True):
        assert torch.equal(one, other)


def make_moe(folder: Any, architecture: str) -> None:
    """Turn the hand-written Llama into a mixture of experts in the hub's classic layout: one tensor per expert and matrix."""
    mixtral = architecture == "MixtralForCausalLM"
    folder.config |= {"architectures": [architecture], "num_local_experts": 3, "num_experts_per_tok": 2, "moe_intermediate_size": 6}
    block = "model.layers.0." + ("block_sparse_moe" if mixtral else "mlp")
    names = ("w1", "w3", "w2") if mixtral else ("gate_proj", "up_proj", "down_proj")
    folder.tensors = {name: tensor for name, tensor in folder.tensors.items() if ".mlp." not in name}
    folder.tensors[f"{block}.gate.weight"] = torch.randn(3, 8)
    for expert in range(3):
        for name, shape in zip(names, ((6, 8), (6, 8), (8, 6)), strict=True):
            folder.tensors[f"{block}.experts.{expert}.{name}.weight"] = torch.randn(shape)
    if not mixtral:
        for name in ("q_norm", "k_norm"):
            folder.tensors[f"model.layers.0.self_attn.{name}.weight"] = torch.randn(4)
    folder.write()


def stack_experts(folder: Any) -> None:
    """The other layout: experts stacked in one tensor, the block called "mlp" in every family."""
    old = folder.tensors
    block = next(name.removesuffix(".gate.weight") for name in old if name.endswith(".gate.weight"))
    names = ("w1", "w3", "w2") if block.endswith("moe") else ("gate_proj", "up_proj", "down_proj")
    gate, up, down = ([old[f"{block}.experts.{expert}.{name}.weight"] for expert in range(3)] for name in names)
    folder.tensors = {name: tensor for name, tensor in old.items() if block not in name}
    folder.tensors["model.layers.0.mlp.gate.weight"] = old[f"{block}.gate.weight"]
    folder.tensors["model.layers.0.mlp.experts.gate_up_proj"] = torch.cat([torch.stack(gate), torch.stack(up)], dim=1)
    folder.tensors["model.layers.0.mlp.experts.down_proj"] = torch.stack(down)
    folder.write()


@pytest.mark.parametrize("architecture", ["MixtralForCausalLM", "Qwen3MoeForCausalLM"])
def test_experts_apart_and_stacked_are_the_same_model(folder: Any, architecture: str) -> None:
    make_moe(folder, architecture)
    apart = folder.load()
    stack_experts(folder)
    stacked = folder.load()
    assert_same(apart.model, stacked.model)
    assert stacked.weight_bytes < stacked.resident_bytes - 4 * 13 * 8  # of three experts a token reads two


def test_a_missing_expert_is_named(folder: Any) -> None:
    make_moe(folder, "MixtralForCausalLM")
    del folder.tensors["model.layers.0.block_sparse_moe.experts.1.w3.weight"]
    folder.write()
    with pytest.raises(CheckpointError, match=r"experts\.1\.w3\.weight is missing"):
        folder.load()


def test_tied_embeddings_serve_as_head_unless_a_head_is_stored(folder: Any) -> None:
    folder.config["tie_word_embeddings"] = True
    folder.write()
    assert torch.equal(folder.load().model.head.weight, folder.tensors["lm_head.weight"])
    del folder.tensors["lm_head.weight"]
    folder.write()
    assert torch.equal(folder.load().model.head.weight, folder.tensors["model.embed_tokens.weight"])
    folder.config["tie_word_embeddings"] = False
    folder.write()
    with pytest.raises(CheckpointError, match=r"lm_head\.weight is missing"):
        folder.load()


def test_a_model_saved_without_its_head_lacks_a_prefix_that_its_head_never_has(folder: Any) -> None:
    whole = folder.load().model
    named = folder.tensors
    folder.tensors = {name.removeprefix("model."): tensor for name, tensor in named.items()}
    folder.tensors["layers.0.self_attn.rotary_emb.inv_freq"] = torch.zeros(2)
    folder.write()
    assert_same(folder.load().model, whole)
    folder.shard(3)
    assert_same(folder.load().model, whole)
    del folder.tensors["lm_head.weight"]
    folder.config["tie_word_embeddings"] = True
    folder.write()
    assert torch.equal(folder.load().model.head.weight, named["model.embed_tokens.weight"])
    folder.tensors["score.weight"] = torch.zeros(2, 8)
    folder.write()
    with pytest.raises(CheckpointError, match=r'1 tensors this architecture does not have, e.g. "model\.score\.weight"'):
        folder.load()


def test_names_with_the_prefix_and_without_it_are_not_mixed(folder: Any) -> None:
    folder.tensors["norm.weight"] = folder.tensors.pop("model.norm.weight")
    folder.write()
    with pytest.raises(CheckpointError, match=r"tensor model\.norm\.weight is missing"):
        folder.load()
    folder.tensors["model.norm.weight"] = 2 * folder.tensors["norm.weight"]
    folder.write()
    with pytest.raises(CheckpointError, match=r'does not have, e.g. "norm\.weight"'):
        folder.load()


@pytest.mark.parametrize("quantization", ["none", "int8"])
@pytest.mark.parametrize("count", [1, 3])
def test_a_tied_table_may_have_the_heads_name_alone(folder: Any, count: int, quantization: str) -> None:
    folder.config["tie_word_embeddings"] = True
    table = folder.tensors.pop("lm_head.weight")
    folder.tensors["model.embed_tokens.weight"] = table
    folder.write()
    usual = folder.load(quantization=quantization)
    folder.tensors["lm_head.weight"] = folder.tensors.pop("model.embed_tokens.weight")
    folder.write() if count == 1 else folder.shard(count)
    loaded = folder.load(quantization=quantization)
    assert torch.equal(loaded.model.embedding.whole(), table)
    assert torch.equal(loaded.model.head(torch.eye(8)), usual.model.head(torch.eye(8)))
    assert loaded.dtype == usual.dtype == torch.float32
    folder.config["tie_word_embeddings"] = False
    folder.write_config()
    with pytest.raises(CheckpointError, match=r"tensor model\.embed_tokens\.weight is missing"):
        folder.load()


def test_headers_of_all_files_share_one_limit(folder: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    folder.shard(3)
    monkeypatch.setattr("headrace.tensor.checkpoint.folder.MAX_HEADER_BYTES", 1000)
    with pytest.raises(
        CheckpointError, match=r"model-00003-of-00003.safetensors: the headers of all files together have more than 1000 bytes"
    ):
        folder.load()


def test_dtype_follows_option_then_configuration_then_weights(folder: Any) -> None:
    folder.tensors = {name: tensor.bfloat16() for name, tensor in folder.tensors.items()}
    folder.write()
    loaded = folder.load()
    assert loaded.dtype == torch.float32  # as config.json says
    assert loaded.model.embedding.whole().dtype == torch.bfloat16  # rows convert exactly when they are looked up
    assert loaded.model.head.weight.dtype == torch.float32
    assert folder.load(dtype=torch.float16).model.head.weight.dtype == torch.float16
    del folder.config["dtype"]
    folder.write()
    loaded = folder.load()
    assert loaded.dtype == torch.bfloat16
    assert loaded.model.kv_groups[0].dtype_bytes == 2
    folder.config["torch_dtype"] = "float16"
    folder.write()
    assert folder.load().dtype == torch.float16


def test_nothing_of_a_loaded_model_is_still_mapped(folder: Any) -> None:
    model = folder.load().model
    before = [weight.clone() for weight in weights_of(model)]
    with folder.weights.open("r+b") as stream:
        stream.truncate(0)  # would be a bus error on a mapped page
    assert all(torch.equal(one, other) for one, other in zip(before, weights_of(model), strict=True))
    assert str(folder.weights) not in Path("/proc/self/maps").read_text()


def test_a_digest_changes_with_weights_and_configuration_and_not_with_the_dtype(folder: Any) -> None:
    first = folder.load().model_digest
    assert folder.load(dtype=torch.bfloat16).model_digest == first
    folder.tensors["model.norm.weight"][3] += 1
    folder.write()
    second = folder.load().model_digest
    folder.config["rope_theta"] = 500.0
    folder.write()
    assert len({first, second, folder.load().model_digest}) == 3


def test_random_weights_depend_on_the_seed_alone(folder: Any) -> None:
    folder.weights.unlink()
    first, again, other = (folder.load(load_format="dummy", seed=seed) for seed in (1, 1, 2))
    assert_same(first.model, again.model)
    assert first.model_digest == again.model_digest != other.model_digest
    assert not torch.equal(first.model.embedding.whole(), other.model.embedding.whole())
    assert torch.equal(first.model.final_norm.weight, torch.ones(8))
    hidden = first.model.embedding.whole().square().mean()
    assert 0.05 < hidden < 0.3  # rows of about unit length


def reader(source: Any, rank: int, world: int) -> WeightReader:
    return WeightReader(source, BACKEND, torch.float32, CPU, Parallelism(world).place(rank))


def batch_of(num_tokens: int) -> ForwardBatch:
    """A prompt without a cache."""
    starts, context = torch.tensor([0, num_tokens], dtype=torch.int32), torch.tensor([num_tokens], dtype=torch.int32)
    return ForwardBatch(torch.arange(num_tokens), starts, context, num_tokens, ())


@pytest.mark.parametrize("world", [2, 3])
def test_ranks_slices_add_up_to_the_whole(folder: Any, world: int) -> None:
    folder.tensors = {
        "a.weight": torch.randn(12, 6), "a.bias": torch.randn(12), "b.weight": torch.randn(18, 6), "b.bias": torch.randn(18),
        "down.weight": torch.randn(5, 12), "down.bias": torch.randn(5), "fused.weight": torch.randn(30, 6), "fused.bias": torch.randn(30),
    }  # fmt: skip
    folder.write()
    x, wide = torch.randn(4, 6), torch.randn(4, 12)
    apart, fused = [Part("a.weight", 12), Part("b.weight", 18)], [Part("fused.weight", 12, 0, 30), Part("fused.weight", 18, 12, 30)]
    checkpoint = Checkpoint(folder.path)
    for parts in (apart, fused):
        whole = reader(checkpoint, 0, 1).column_linear(parts, 6, bias=True)(x).split([12, 18], dim=1)  # type: ignore[no-untyped-call]
        ranks = [reader(checkpoint, rank, world).column_linear(parts, 6, bias=True)(x) for rank in range(world)]
        pieces = [rank.split([12 // world, 18 // world], dim=1) for rank in ranks]  # type: ignore[no-untyped-call]
        for index in range(2):
            assert torch.allclose(torch.cat([piece[index] for piece in pieces], dim=1), whole[index], atol=1e-6)
    down = Part("down.weight", 5)
    shares = wide.chunk(world, dim=1)
    summed = sum(reader(checkpoint, rank, world).row_linear(down, 12, bias=True)(shares[rank]) for rank in range(world))
    assert torch.allclose(torch.as_tensor(summed), reader(checkpoint, 0, 1).row_linear(down, 12, bias=True)(wide), atol=1e-5)


@pytest.mark.parametrize("stacked", [False, True])
def test_ranks_of_a_mixture_add_up_to_the_whole(folder: Any, stacked: bool) -> None:
    make_moe(folder, "Qwen3MoeForCausalLM")
    if stacked:
        stack_experts(folder)
    spec, x = MoeSpec(num_experts=3, top_k=2, size=6, is_renormalised=True), torch.randn(7, 8)
    checkpoint = Checkpoint(folder.path)

    def moe(rank: int, world: int) -> torch.Tensor:
        return SparseMoe(reader(checkpoint, rank, world), "model.layers.0.", spec, MoeNames(), 8)(x, batch_of(7))

    assert torch.allclose(moe(0, 2) + moe(1, 2), moe(0, 1), atol=1e-5)


def test_every_rank_slices_the_same_random_tensor() -> None:
    source = RandomWeights(5, torch.float32, 1.0)
    whole = source.read("x.weight", (6, 4))
    assert torch.equal(torch.cat([source.read("x.weight", (6, 4), (slice(0, 2),)), source.read("x.weight", (6, 4), (slice(2, 6),))]), whole)


def test_a_neighbour_in_the_batch_does_not_change_a_tokens_experts(folder: Any) -> None:
    torch.manual_seed(1)
    make_moe(folder, "Qwen3MoeForCausalLM")
    spec = MoeSpec(num_experts=3, top_k=2, size=6, is_renormalised=False)
    checkpoint = Checkpoint(folder.path)
    moe = SparseMoe(reader(checkpoint, 0, 1), "model.layers.0.", spec, MoeNames(), 8)
    x = torch.randn(9, 8)
    together = moe(x, batch_of(9))
    for token in range(9):
        off = moe(x[token : token + 1], batch_of(1))[0] - together[token]
        assert off.abs().max() <= 1e-6 * together[token].abs().max(), "large numbers that cancel are off by their own rounding"
