"""Tests the parts that ranks hold of a model: all together answer as the model on one rank, and what has no equal parts is refused."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from functools import partial
from mmap import mmap
from pathlib import Path
from typing import Any

import pytest
import torch
from adapter_kit import ALL, save_adapter
from cpu_families import AVX2
from float_formats_kit import Compressed, Fp8, ModelOpt
from quantized_kit import Awq, Gptq, Stored, load, logits, save_pair
from rank_kit import Ranks
from safetensors.torch import load_file, save_file
from torch import Tensor

from headrace.core.errors import CheckpointError, ConfigError
from headrace.core.parallelism import Parallelism
from headrace.tensor.adapters.loader import AdapterLoader
from headrace.tensor.backends import load_backend
from headrace.tensor.batch import PackedAdapter, allocate_kv
from headrace.tensor.device import CPU
from headrace.tensor.kernels.cpu.launch_list import RecordedLaunches
from headrace.tensor.kernels.cpu.peers import SharedMemoryPeers, shared_bytes
from headrace.tensor.kernels.rounding import Precision, RoundedWeight, round_weight
from headrace.tensor.models import LoadedModel, decoder, describe, load_model
from headrace.tensor.peers import NoPeers, Peers

pytestmark = pytest.mark.socket

Resident = tuple[PackedAdapter | None, ...]
VOCAB = 31
TINY = {"vocab_size": VOCAB, "hidden_size": 96, "intermediate_size": 40, "num_hidden_layers": 3, "num_attention_heads": 12, "head_dim": 16,
        "num_key_value_heads": 2, "max_position_embeddings": 64, "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2}  # fmt: skip
FAMILIES: dict[str, dict[str, Any]] = {
    "Llama": {"attention_bias": True, "mlp_bias": True},
    "Qwen2": {"tie_word_embeddings": True, "vocab_size": 32},
    "Qwen3": {},
    "Phi3": {"hidden_size": 192},
    "Mixtral": {"num_local_experts": 4},
    "Qwen3Moe": {"num_experts": 8, "num_experts_per_tok": 3, "moe_intermediate_size": 24, "mlp_only_layers": [1]},
    "Gemma3": {"sliding_window": 6, "layer_types": ["sliding_attention", "full_attention", "sliding_attention"]},
}
EXPERTS = ("Mixtral", "Qwen3Moe")
ADAPTED = ("Llama", "Phi3", "Gemma3", "Qwen3Moe")
TP2, TP4, PP2, PP3, BOTH = Parallelism(2), Parallelism(4), Parallelism(1, 2), Parallelism(1, 3), Parallelism(2, 2)
DIVISIONS = {
    "tp2": TP2,
    "tp4": TP4,
    "pp2": PP2,
    "pp3": PP3,
    "tp2-pp2": BOTH,
    "ep2": Parallelism(2, ep=True),
    "ep4-pp2": Parallelism(4, 2, ep=True),
}
CASES = [(family, name) for family in FAMILIES for name in DIVISIONS if "ep" not in name or family in EXPERTS]


def loader(folder: Path, kernels: str = "reference", **options: Any) -> Callable[..., LoadedModel]:
    given: dict[str, Any] = {"dtype": None, "device": CPU, "load_format": "auto", "seed": 0, "max_model_len": None, **options}
    return partial(load_model, folder, backend=load_backend(kernels), **given)


@contextmanager
def aborting(peers: Peers) -> Iterator[None]:
    try:
        yield
    except BaseException:
        peers.abort()
        raise


def answers(
    paged_run: Callable[..., Any], resident: Callable[[LoadedModel], Resident] = lambda _: (None,), places: tuple[int, int] = (0, 0)
) -> Callable[[LoadedModel], Tensor]:
    """Logits of two sequences in ragged steps: prompts in chunks, decodes beside them, some tokens that nobody asks about.

    resident, places: adapters by place, and the places of the sequences'
    """
    draw = random.Random(5)
    prompts = [[draw.randrange(VOCAB) for _ in range(length)] for length in (23, 12)]

    def answer(loaded: LoadedModel) -> Tensor:
        run = paged_run(loaded.model, num_blocks=24, resident=resident(loaded))
        first, second = (run.add(tokens, place=place) for tokens, place in zip(prompts, places, strict=True))
        run.step({first: 9, second: 5}, selected=[])
        run.step({first: 8, second: 1}, selected=[2, 7, 8])
        run.finish(chunk=3)
        return torch.cat([run.logits(first), run.logits(second)]) if loaded.model.place.is_last else torch.empty(0)

    return answer


@pytest.mark.parametrize(("family", "name"), CASES)
def test_ranks_answer_as_the_model_on_one(
    family: str,
    name: str,
    make_oracle: Callable[..., Any],
    paged_run: Callable[..., Any],
    assert_close: Callable[[Tensor, Tensor], None],
    tmp_path: Path,
) -> None:
    parallelism = DIVISIONS[name]
    make_oracle(family, tmp_path, **{**TINY, **FAMILIES[family]})
    whole, ranks = loader(tmp_path)(), Ranks(parallelism, loader(tmp_path))
    found = ranks.run(answers(paged_run))
    assert all(len(logits_of_rank) == 0 for logits_of_rank in found[1:])
    assert_close(found[0], answers(paged_run)(whole))


def residents(folders: list[Path]) -> Callable[[LoadedModel], Resident]:
    """The folders' adapters in the places from 1 on."""

    def load_all(loaded: LoadedModel) -> Resident:
        assert loaded.model.adapters is not None
        adapters = AdapterLoader(loaded.model.adapters, max_rank=6)
        packed = [adapters.load(folder, adapters.inspect(folder)) for folder in folders]
        assert all(each.num_bytes <= adapters.max_bytes for each in packed)
        return (None, *packed)

    return load_all


@pytest.mark.parametrize(("family", "name"), [case for case in CASES if case[0] in ADAPTED])
def test_ranks_answer_with_adapters_as_the_model_on_one(
    family: str,
    name: str,
    make_oracle: Callable[..., Any],
    paged_run: Callable[..., Any],
    assert_close: Callable[[Tensor, Tensor], None],
    tmp_path: Path,
) -> None:
    """Two adapters of other linears and ranks, then one beside the base model: two of its KV heads are held twice on four ranks."""
    make_oracle(family, tmp_path, **{**TINY, **FAMILIES[family]})
    folders = [
        save_adapter(tmp_path / "a", tmp_path, 1, 6, ALL, use_rslora=True),
        save_adapter(tmp_path / "b", tmp_path, 2, 3, ("v_proj", "o_proj", "qkv_proj", "down_proj")),
    ]
    load_part = loader(tmp_path, enable_lora=True)
    whole, ranks = load_part(), Ranks(DIVISIONS[name], load_part)
    base = answers(paged_run)(whole)
    for places in ((1, 2), (0, 1)):
        ask = answers(paged_run, residents(folders), places)
        wanted = ask(whole)
        assert_close(ranks.run(ask)[0], wanted)
        assert not torch.allclose(wanted[-1], base[-1], atol=0.05)


@pytest.mark.parametrize(("family", "name"), [("Llama", "tp4"), ("Phi3", "tp2-pp2")])
def test_a_rank_refuses_the_adapters_that_one_rank_would(family: str, name: str, make_oracle: Callable[..., Any], tmp_path: Path) -> None:
    """Those of linears that are in other stages too, and of other shapes there."""
    make_oracle(family, tmp_path, **{**TINY, **FAMILIES[family]})
    folder = save_adapter(tmp_path / "a", tmp_path, 1, 6, ALL)
    tensors = load_file(folder / "adapter_model.safetensors")
    spoilt: dict[str, dict[str, Tensor]] = {
        "it belongs to no linear of the base model": {key.replace("layers.0", "layers.7"): value for key, value in tensors.items()},
        "no tensor of layer 0": {key: value for key, value in tensors.items() if "layers.0" not in key},
        "the model makes it": {key: value[:, 1:] if "layers.0" in key and "_A" in key else value for key, value in tensors.items()},
        "values that are NaN": {key: value * torch.nan if "layers.0" in key else value for key, value in tensors.items()},
    }
    load_part = loader(tmp_path, enable_lora=True)
    for loaded in Ranks(DIVISIONS[name], load_part).loaded:
        assert loaded.model.adapters is not None
        adapters = AdapterLoader(loaded.model.adapters, max_rank=6)
        for reason, written in spoilt.items():
            save_file({key: value.contiguous() for key, value in written.items()}, folder / "adapter_model.safetensors")
            with pytest.raises(CheckpointError, match=reason):
                adapters.inspect(folder)


def test_the_parts_of_an_adapter_make_up_the_whole(make_oracle: Callable[..., Any], tmp_path: Path) -> None:
    """But for lora_A of a linear whose rows are divided, and lora_B of one whose columns are: each rank has them."""
    make_oracle("Llama", tmp_path, **{**TINY, **FAMILIES["Llama"]})
    folder = save_adapter(tmp_path / "a", tmp_path, 1, 4, ("gate_proj", "down_proj"))
    load_part = loader(tmp_path, enable_lora=True)
    parts = [residents([folder])(loaded)[1] for loaded in (load_part(), *Ranks(BOTH, load_part).loaded)]
    assert [part.num_bytes for part in parts if part is not None] == [
        4 * 4 * layers * 2 * (96 + features) for layers, features in ((3, 40), (1, 20), (1, 20), (2, 20), (2, 20))
    ]


@pytest.mark.parametrize("name", ["tp2-pp2", "ep2"])
def test_ranks_whose_routers_disagree_choose_the_experts_of_the_first(
    name: str, make_oracle: Callable[..., Any], paged_run: Callable[..., Any], tmp_path: Path
) -> None:
    """A library's product may have other bits on a rank with another number of threads, and two scores are then ordered otherwise."""
    make_oracle("Mixtral", tmp_path, **{**TINY, **FAMILIES["Mixtral"]})
    ranks = Ranks(DIVISIONS[name], loader(tmp_path))
    wanted = ranks.run(answers(paged_run))[0]
    for loaded in ranks.loaded:
        if loaded.model.place.tp_rank:
            for block in loaded.model.blocks:
                block.mlp.router.weight.neg_()  # type: ignore[union-attr]
    assert torch.equal(ranks.run(answers(paged_run))[0], wanted)


@pytest.mark.parametrize("name", ["tp2", "pp3", "ep2", "ep4-pp2"])
def test_the_first_rank_counts_the_tokens_of_all_experts_of_its_layers(
    name: str, make_oracle: Callable[..., Any], paged_run: Callable[..., Any], tmp_path: Path
) -> None:
    """The middle layer is dense."""
    make_oracle("Qwen3Moe", tmp_path, **{**TINY, **FAMILIES["Qwen3Moe"]})
    whole, ranks = loader(tmp_path)(), Ranks(DIVISIONS[name], loader(tmp_path))
    ranks.run(answers(paged_run))
    answers(paged_run)(whole)
    counted, own = whole.model.expert_tokens, ranks.loaded[0].model
    assert [*counted] == [0, 2]
    assert sum(counted[0]) == 35 * 3, "each of the prompts' tokens chose three"
    assert 0 < sum(counted[2]) < sum(counted[0]), "the last layer computes what somebody asks about"
    layers = own.place.layers(3)
    assert own.expert_tokens == {layer: tokens for layer, tokens in counted.items() if layer in layers}


@pytest.mark.parametrize(("family", "name"), [("Llama", "tp2"), ("Gemma3", "tp2-pp2"), ("Mixtral", "ep2")])
def test_compiled_kernels_take_the_parts(
    family: str,
    name: str,
    make_oracle: Callable[..., Any],
    paged_run: Callable[..., Any],
    assert_close: Callable[[Tensor, Tensor], None],
    tmp_path: Path,
) -> None:
    """Query heads in groups of three, as in the other tests of models: one shape is compiled."""
    make_oracle(family, tmp_path, **{**TINY, **FAMILIES[family], "num_key_value_heads": 4})
    folder = save_adapter(tmp_path / "a", tmp_path, 1, 6, ALL)
    ranks, whole = Ranks(DIVISIONS[name], loader(tmp_path, "numba", enable_lora=True)), loader(tmp_path, enable_lora=True)()
    for places in ((0, 0), (0, 1)):
        ask = answers(paged_run, residents([folder]), places)
        assert_close(ranks.run(ask)[0], ask(whole))


@pytest.mark.parametrize("name", ["tp2", "tp2-pp2"])
def test_recorded_steps_of_ranks_have_the_bits_of_steps_run_at_once(
    name: str, make_oracle: Callable[..., Any], paged_run: Callable[..., Any], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """Sums and transfers through shared memory are kernels of the step, and so are adapters."""
    parallelism = DIVISIONS[name]
    make_oracle("Llama", tmp_path, **{**TINY, **FAMILIES["Llama"], "num_key_value_heads": 4})
    num_replayed = 0

    def replay(recorded: RecordedLaunches) -> bool:
        nonlocal num_replayed
        num_replayed += 1
        return replay_whole(recorded)

    ask = answers(paged_run, residents([save_adapter(tmp_path / "a", tmp_path, 1, 6, ALL)]), (1, 0))
    replay_whole = RecordedLaunches.replay
    monkeypatch.setattr(RecordedLaunches, "replay", replay)

    def found() -> list[Tensor]:
        memory = mmap(-1, shared_bytes(parallelism))
        peers = [SharedMemoryPeers(memory, parallelism.place(rank)) for rank in range(parallelism.world)]
        load_part = loader(tmp_path, "numba", enable_lora=True)
        ranks = [load_part(place=parallelism.place(rank), peers=each) for rank, each in enumerate(peers)]

        def compute(rank: int) -> Tensor:
            with torch.inference_mode(), aborting(peers[rank]):
                return torch.cat([answers(paged_run)(ranks[rank]), ask(ranks[rank])])

        with ThreadPoolExecutor(len(ranks)) as threads:
            return list(threads.map(compute, range(len(ranks))))

    recorded, replays = found(), num_replayed
    monkeypatch.setattr(decoder, "can_be_deferred", lambda _: False)
    assert all(map(torch.equal, recorded, found()))
    assert 0 < replays == num_replayed


@pytest.mark.parametrize("family", ["Llama", "Qwen2", "Gemma3"])
@pytest.mark.parametrize("name", ["tp2", "pp2", "tp2-pp2"])
def test_parts_make_up_the_whole(family: str, name: str, make_oracle: Callable[..., Any], tmp_path: Path) -> None:
    parallelism = DIVISIONS[name]
    make_oracle(family, tmp_path, **{**TINY, **FAMILIES[family]})
    whole, ranks = loader(tmp_path)(), Ranks(parallelism, loader(tmp_path)).loaded
    assert sum(rank.resident_bytes for rank in ranks) == whole.resident_bytes
    assert sum(rank.weight_bytes for rank in ranks) == whole.weight_bytes
    sizes = [[group.block_bytes(16) for group in rank.model.kv_groups] for rank in ranks]
    assert [sum(of_group) for of_group in zip(*sizes, strict=True)] == [group.block_bytes(16) for group in whole.model.kv_groups]
    for rank in ranks:
        described = describe(tmp_path, place=rank.model.place)
        assert (described.resident_bytes, described.kv_groups) == (rank.resident_bytes, rank.model.kv_groups)


def test_a_group_without_layers_of_the_stage_takes_no_memory(make_oracle: Callable[..., Any], tmp_path: Path) -> None:
    """Its blocks have numbers all the same: these mean the same sequence on every rank."""
    make_oracle("Gemma3", tmp_path, **{**TINY, **FAMILIES["Gemma3"]})
    model = Ranks(PP2, loader(tmp_path)).loaded[0].model
    assert [(group.window, group.layers) for group in model.kv_groups] == [(6, (2,)), (None, ())]
    kv = allocate_kv(model.kv_shapes, model.group_of, (5, 7), 4, torch.float32, CPU)
    assert [tuple(pool.shape) for pool in kv.pools] == [(5, 2 * 4 * 2 * 16 * 4), (7, 0)]
    kv.copy_block(1, 2, 3)
    kv.clear_pad_block()


def test_fewer_kv_heads_than_ranks_are_held_where_their_queries_are(make_oracle: Callable[..., Any], tmp_path: Path) -> None:
    make_oracle("Llama", tmp_path, **TINY)
    whole, ranks = loader(tmp_path)().model.blocks[0], Ranks(TP4, loader(tmp_path)).loaded
    assert [rank.model.kv_shapes[0] for rank in ranks] == [(1, 16)] * 4
    weights = [rank.model.blocks[0].attention.qkv.weight for rank in ranks]  # type: ignore[attr-defined]
    query, key, value = whole.attention.qkv.weight.split([192, 32, 32])  # type: ignore[attr-defined]
    for rank, weight in enumerate(weights):
        own = slice(rank // 2 * 16, rank // 2 * 16 + 16)
        assert torch.equal(weight, torch.cat([query[48 * rank : 48 * rank + 48], key[own], value[own]]))


EXACT: list[Stored] = [
    *(Gptq(4, 32), Gptq(3, 32), Gptq(8, 32), Gptq(4, 32, desc_act=True), Awq(32), Awq(-1)),
    *(Compressed("pack-quantized", 4, (1, 32)), Compressed("int-quantized", 8, (1, 0)), Fp8(), Fp8((64, 32), "weight_scale_inv")),
    ModelOpt("NVFP4"),
]


@pytest.mark.parametrize("stored", EXACT, ids=str)
@pytest.mark.parametrize("architecture", ["Llama", "Phi3"])
def test_quantized_weights_are_divided_to_the_bit(
    stored: Stored, architecture: str, assert_close: Callable[[Tensor, Tensor], None], tmp_path: Path
) -> None:
    """Where they are dequantized: 160 features, which have no whole number of groups on two ranks."""
    pair = save_pair(tmp_path, architecture, stored, head=True)
    found = Ranks(TP2, partial(load, pair.folder)).run(logits)
    assert_close(found[0], logits(load(pair.plain)))


IN_FEW_BITS: list[tuple[Stored, int]] = [
    *(
        (stored, 4)
        for stored in (Gptq(4, 32), Gptq(4, 64), Gptq(2, 32, version=2), Awq(32), Awq(-1), Compressed("pack-quantized", 4, (1, 32)))
    ),
    *((stored, 8) for stored in (Gptq(8, 32), Gptq(4, 32, desc_act=True), Compressed("int-quantized", 8, (1, 0)))),
]


@pytest.mark.parametrize(("stored", "bits"), IN_FEW_BITS, ids=str)
def test_a_rank_holds_the_bits_that_one_rank_would(stored: Stored, bits: int, tmp_path: Path) -> None:
    """Inputs are rounded by the row, and a part of a row has a scale of its own: logits are close. 192 features on two ranks are one and a
    half groups of 64, which become groups of 32."""
    pair = save_pair(tmp_path, "Llama", stored, ffn=192)
    numba = partial(load, pair.folder, backend=load_backend("numba", features=AVX2))
    whole, ranks = numba(), Ranks(TP2, numba)
    assert whole.held == f"linears in {bits} bits: 4, dense: 1"
    assert [rank.held for rank in ranks.loaded] == [whole.held] * 2
    found, wanted = ranks.run(logits), logits(whole)
    assert (found[0] - wanted).abs().max() <= 0.03 * wanted.abs().max()


@pytest.mark.parametrize("quantization", ["int8", "int4"])
def test_parts_that_are_rounded_at_load_stay_close(quantization: str, tmp_path: Path) -> None:
    """A row's part has its own scale, which is no coarser than the row's."""
    pair = save_pair(tmp_path, "Llama", Gptq(4, 32), ffn=192)
    rounded = partial(load, pair.plain, quantization=quantization)
    found, exact = Ranks(TP2, rounded).run(logits)[0], logits(load(pair.plain))
    error, of_one_rank = ((each - exact).norm() / exact.norm() for each in (found, logits(rounded())))
    assert error <= 1.2 * of_one_rank


@pytest.mark.parametrize(("stored", "quantization"), [(Gptq(4, 32), "none"), (Awq(32), "none"), (Fp8(), "int4")], ids=str)
def test_a_part_that_would_be_held_in_other_bits_is_refused(stored: Stored, quantization: str, tmp_path: Path) -> None:
    """Half of 160 features are no whole number of groups of 32."""
    pair = save_pair(tmp_path, "Llama", stored)
    numba = partial(load, pair.folder, backend=load_backend("numba", features=AVX2), quantization=quantization)
    assert "in 4 bits" in numba().held
    with pytest.raises(ConfigError, match=r"tensor_parallel_size: 2: .*\.mlp\.down_proj\.weight .* in groups of 32 of its 160 inputs"):
        Ranks(TP2, numba)


@pytest.mark.parametrize("precision", [Precision.INT8, Precision.INT4, Precision.FP8])
def test_columns_of_a_rounded_weight_keep_their_values(precision: Precision) -> None:
    weight = round_weight(torch.randn(3, 384, generator=torch.Generator().manual_seed(1)), precision, group=128)
    if weight.group:
        weight = RoundedWeight(weight.values, weight.scales, 128, torch.randn(3, 3).half())
    for first, last, group in ((0, 128, 128), (128, 384, 128), (64, 192, 64), (96, 352, 32)):
        part = weight.columns(slice(first, last))
        assert part is not None
        assert part.group == (group if weight.group else 0)
        assert torch.equal(part.dense(), weight.dense()[:, first:last])
    assert (weight.columns(slice(16, 384)) is None) == bool(weight.group)


REFUSED: dict[str, tuple[str, dict[str, Any], Parallelism, str]] = {
    "heads": ("Llama", {}, Parallelism(5), "tensor_parallel_size: 5: 12 query heads do not divide by it. Use one of 1, 2, 4."),
    "kv heads": ("Llama", {"num_key_value_heads": 6}, TP4, ": 4: 6 KV heads neither divide by it nor divide it. Use one of 1, 2."),
    "features": ("Llama", {"intermediate_size": 42}, TP4, "42 features of a feed-forward block do not divide by it. Use one of 1, 2."),
    "expert features": ("Mixtral", {"num_local_experts": 4, "intermediate_size": 42}, TP4, "42 features .* Use one of 1, 2."),
    "experts": ("Mixtral", {"num_local_experts": 3}, Parallelism(2, ep=True), ": 2: 3 experts do not divide by it. Use one of 1."),
    "vocabulary": ("Llama", {"vocab_size": 5}, TP4, "a vocabulary of 5 leaves the last of as many parts empty. Use one of 1, 2."),
    "layers": ("Llama", {}, Parallelism(1, 4), "pipeline_parallel_size: 4 is more than the 3 layers of this model. Use at most 3."),
    "no experts": ("Llama", {}, Parallelism(2, ep=True), "enable_expert_parallel: this model has no experts"),
    "one rank": ("Mixtral", {}, Parallelism(1, 2, ep=True), "enable_expert_parallel: .* tensor_parallel_size ranks, and it is 1"),
}


@pytest.mark.parametrize("name", REFUSED)
def test_what_has_no_equal_parts_is_refused_by_name(name: str, make_oracle: Callable[..., Any], tmp_path: Path) -> None:
    family, fields, parallelism, named = REFUSED[name]
    make_oracle(family, tmp_path, **{**TINY, **fields})
    (tmp_path / "model.safetensors").unlink()  # it is refused before a weight is read
    with pytest.raises(ConfigError, match=named):
        describe(tmp_path, place=parallelism.place(0))
    with pytest.raises(ConfigError, match=named):
        Ranks(parallelism, loader(tmp_path))


@pytest.mark.parametrize("name", ["pp2", "ep2"])
def test_every_rank_looks_at_what_the_others_read(name: str, make_oracle: Callable[..., Any], tmp_path: Path) -> None:
    make_oracle("Mixtral", tmp_path, **TINY, num_local_experts=2, save={"save_original_format": True})
    tensors = load_file(tmp_path / "model.safetensors")
    spoilt = {
        "is missing": {name: tensor for name, tensor in tensors.items() if "layers.0.block_sparse_moe.experts.0.w2" not in name},
        "1 tensors this architecture does not have": {**tensors, "model.layers.0.more.weight": torch.ones(2)},
    }
    assert len(spoilt["is missing"]) < len(tensors)
    parallelism = DIVISIONS[name]
    for reason, written in spoilt.items():
        save_file(written, tmp_path / "model.safetensors", {"format": "pt"})
        for rank in range(2):
            with pytest.raises(CheckpointError, match=reason):
                loader(tmp_path)(place=parallelism.place(rank), peers=NoPeers())
