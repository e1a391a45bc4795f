"""Tests building a runner from a folder and a configuration, with every decision logged."""

from __future__ import annotations

import json
import shutil
import threading
from contextlib import nullcontext
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from failpoint_kit import Injected, armed
from runner_kit import CONTEXT, VOCAB, DenseLlama, Planner, row_tokens

from headrace.core.errors import CheckpointError, ConfigError
from headrace.core.speculation import SpeculativeConfig
from headrace.engine.config import EngineConfig
from headrace.engine.runner import build as runner_build
from headrace.engine.runner import loading
from headrace.engine.runner.build import AnyRunner, build_runner
from headrace.engine.runner.model_runner import ModelRunner, OverlappedRunner
from headrace.machine.resources import Available
from headrace.tensor.batch import KvCache
from headrace.tensor.device import CPU
from headrace.tensor.host.cpu_features import CpuFeatures
from headrace.tensor.kernels.cpu.backend import FEW_TOKENS
from headrace.tensor.kernels.cpu.jit import launch
from headrace.tensor.layers.moe import MoeSpec
from headrace.tensor.models.decoder import DecoderModel

pytestmark = pytest.mark.pure


def config(folder: Path, **changes: Any) -> EngineConfig:
    return EngineConfig(
        **{"model": str(folder), "kernels": "reference", "max_num_seqs": 4, "max_num_batched_tokens": 32, **changes}
    ).checked()


def test_the_runner_answers_and_its_facts_are_right(tiny_folder: Path, dense: DenseLlama) -> None:
    runner, info = build_runner(config(tiny_folder))
    planner, prompt = Planner(block_size=16), [5, 6, 7]
    planner.start(3, prompt)
    assert row_tokens(runner.submit(planner.plan((3, 0, 3, 1))).result()) == [dense.greedy(prompt, 1)]
    assert (info.architecture, info.vocab_size, info.max_model_len, info.eos_token_ids) == ("LlamaForCausalLM", VOCAB, CONTEXT, (2,))
    assert (info.block_size, info.num_blocks, info.dtype) == (16, (4 * CONTEXT // 16 + 1,), "float32")
    assert info.weight_bytes > 0
    assert info.costly_context == 90
    assert min(info.peak_read_bytes_per_s, info.peak_flops_per_s) > 0.0
    assert {line.partition(":")[0] for line in info.decided} == {
        "model",
        "threads",
        "device",
        "draw",
        "dtype",
        "kernels",
        "KV dtype",
        "KV memory",
        "KV cache",
        "peaks, as measured",
        "warm-up",
    }


def test_speculation_is_among_what_was_decided(tiny_folder: Path) -> None:
    drafting = SpeculativeConfig(method="suffix", num_speculative_tokens=7)
    _, info = build_runner(config(tiny_folder, device="cpu", speculative_config=drafting))
    assert "speculation: suffix, at most 7 drafted tokens" in info.decided


def test_context_is_costly_where_attention_takes_as_long_as_the_products(decoder: DecoderModel) -> None:
    """Per token and layer 32 x (96 + 144) multiplications; attention 2 x 4 x 8 per token of context, at three quarters of the speed."""
    spec = decoder.spec
    num_layers = len(spec.layers)
    assert spec.flops(VOCAB) == (2 * (num_layers * 32 * (96 + 144) + 32 * VOCAB), 2 * num_layers * 2 * 4 * 8)
    layer, attention = spec.layers[0], spec.layers[0].attention
    windowed = replace(layer, attention=replace(attention, window=5))
    experts = replace(layer, mlp=MoeSpec(num_experts=8, top_k=2, size=48, is_renormalised=True))
    assert spec.costly_context() == 90
    assert replace(spec, layers=(layer, windowed)).costly_context() == 180
    assert replace(spec, layers=(windowed, windowed)).costly_context() == 0
    assert replace(spec, layers=(experts, experts)).costly_context() == 144


def greedy_tokens(runner: AnyRunner, *, num_tokens: int) -> list[object]:
    """What follows a prompt of five tokens, step by step."""
    planner = Planner(block_size=16)
    planner.start(3, [5, 6, 7, 8, 9])
    tokens = [row_tokens(runner.submit(planner.plan((3, 0, 5, 1))).result())]
    return [*tokens, *(row_tokens(runner.submit(planner.plan((3, 5 + i, 1, 1))).result()) for i in range(num_tokens - 1))]


@pytest.mark.parametrize("quantization", ["int8", "int4"])
def test_rounded_weights_answer_alike_whoever_computes_them(tiny_folder: Path, quantization: str) -> None:
    pytest.importorskip("numba")
    plain = build_runner(config(tiny_folder))[1]
    answers = []
    for kernels in ("reference", "numba"):
        runner, info = build_runner(config(tiny_folder, kernels=kernels, quantization=quantization))
        answers.append(greedy_tokens(runner, num_tokens=9))
        assert info.weight_bytes < plain.weight_bytes / 2
        assert info.digests["model"] != plain.digests["model"]
        assert f"linears rounded to {quantization}" in info.decided[0]
    assert answers[0] == answers[1]


@pytest.mark.parametrize(("stored", "share"), [("bfloat16", 0.5), ("int8", 0.25 + 1 / 8)])
def test_a_smaller_cache_answers_alike_whoever_computes_it(tiny_folder: Path, stored: str, share: float) -> None:
    """tiny's heads have 8 elements: a scale is an eighth of what they are in float32."""
    pytest.importorskip("numba")
    plain = build_runner(config(tiny_folder))[1]
    answers = []
    for kernels in ("reference", "numba"):
        runner, info = build_runner(config(tiny_folder, kernels=kernels, kv_cache_dtype=stored))
        answers.append(greedy_tokens(runner, num_tokens=41))
        assert info.kv_groups[0].block_bytes(16) == share * plain.kv_groups[0].block_bytes(16)
        assert f"KV dtype: {stored}, as configured" in "; ".join(info.decided)
    assert answers[0] == answers[1]


@pytest.mark.parametrize(
    ("changes", "stored", "flags", "dtype"),
    [
        ({}, "bfloat16", {"avx512_bf16"}, torch.bfloat16),
        ({}, "bfloat16", {"avx2"}, torch.float32),
        ({}, "float32", {"avx512_bf16"}, torch.float32),
        ({"dtype": "float32"}, "bfloat16", {"avx512_bf16"}, torch.float32),
        ({"kv_cache_dtype": "int8"}, "bfloat16", {"avx512_bf16"}, torch.int8),
    ],
)
def test_a_cache_beside_rounded_weights_is_no_wider_than_the_checkpoint(
    tiny_folder: Path, changes: dict[str, Any], stored: str, flags: set[str], dtype: torch.dtype
) -> None:
    """Which are computed in float32, whatever the CPU could."""
    asked = config(tiny_folder, quantization="int8", **changes)
    assert loading._kv_dtype(asked, torch.float32, stored, CpuFeatures("x86_64", frozenset(flags)))[0] == dtype


def test_warm_up_leaves_nothing_behind(tiny_folder: Path) -> None:
    runner, _ = build_runner(config(tiny_folder))
    assert isinstance(runner, ModelRunner)
    assert not any(layer.values.any() for layer in runner.kv.layers), "only the pad block was written, and it was cleared"
    planner = Planner(block_size=16)
    planner.blocks[0] = []
    with pytest.raises(Exception, match="slot 0 has 0 known ids"):
        runner.submit(planner.plan((0, 0, 1, 1))).result()


def test_the_longest_step_finds_every_kernel_compiled(tiny_folder: Path) -> None:
    runner, _ = build_runner(config(tiny_folder, kernels="numba", max_num_batched_tokens=CONTEXT))
    compiled = len(launch._COMPILED)
    planner = Planner(block_size=16)
    planner.start(0, [7] * (CONTEXT - 1))
    row_tokens(runner.submit(planner.plan((0, 0, CONTEXT - 1, 1))).result())
    assert CONTEXT - 1 > FEW_TOKENS, "a step of the other kind than those of the warm-up"
    assert len(launch._COMPILED) == compiled


@pytest.mark.socket
def test_depth_two_computes_on_a_thread_of_its_own(tiny_folder: Path, dense: DenseLlama) -> None:
    runner, _ = build_runner(config(tiny_folder, depth=2))
    try:
        assert isinstance(runner, OverlappedRunner)
        planner = Planner(block_size=16)
        planner.start(0, [9, 9])
        assert row_tokens(runner.submit(planner.plan((0, 0, 2, 1))).result()) == [dense.greedy([9, 9], 1)]
    finally:
        runner.close()


def test_text_files_are_part_of_the_identity(tiny_folder: Path, tmp_path: Path) -> None:
    folder = tmp_path / "copy"
    shutil.copytree(tiny_folder, folder)
    (folder / "tokenizer.json").write_text("{}")
    digests = [build_runner(config(f))[1].digests for f in (tiny_folder, folder)]
    assert digests[0]["model"] == digests[1]["model"]
    assert digests[0]["kv_dtype"] == "float32"
    assert build_runner(replace(config(tiny_folder), kv_cache_dtype="int8"))[1].digests["kv_dtype"] == "int8"
    assert (digests[0]["tokenizer"], bool(digests[1]["tokenizer"])) == ("", True)


def test_random_weights_need_only_the_configuration(tiny_folder: Path, tmp_path: Path) -> None:
    shutil.copy(tiny_folder / "config.json", tmp_path)
    _, info = build_runner(config(tmp_path, load_format="dummy", dtype="bfloat16"))
    assert info.dtype == "bfloat16"
    assert "dtype: bfloat16, as configured" in info.decided
    with pytest.raises(CheckpointError):
        build_runner(config(tmp_path))


@pytest.mark.parametrize("length", [1, 2, 3])
def test_the_shortest_contexts_can_be_built(tiny_folder: Path, length: int) -> None:
    assert build_runner(config(tiny_folder, max_model_len=length))[1].max_model_len == length


def test_weights_that_do_not_fit_are_refused_before_they_are_read(tiny_folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(CPU, "free_memory", lambda: Available(50_000, "the cgroup's limit"))
    monkeypatch.setattr(loading, "load_model", lambda *args, **kwargs: pytest.fail("weights were read"))
    with pytest.raises(ConfigError, match=r"model: 8\d\.\d KiB of float32 weights do not fit the 48\.8 KiB that the cgroup's limit leaves"):
        build_runner(config(tiny_folder))


def test_the_weights_of_all_ranks_must_fit_together(tiny_folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each rank's part fit, and the system killed the ranks while they loaded."""
    pair = config(tiny_folder, tensor_parallel_size=2)
    part = loading.choose(pair, None, place=pair.parallelism.place(1)).described.resident_bytes
    for free, fits in ((2 * part, True), (2 * part - 1, False)):
        monkeypatch.setattr(CPU, "free_memory", lambda free=free: Available(free, "the cgroup's limit"))
        with nullcontext() if fits else pytest.raises(ConfigError, match=r"of float32 weights on each of 2 ranks do not fit the"):
            loading.choose(pair, None, place=pair.parallelism.place(1))


def test_a_small_machine_shortens_the_context_and_says_so(tiny_folder: Path) -> None:
    _, info = build_runner(config(tiny_folder, num_kv_blocks=3))
    assert info.max_model_len == 32
    assert any("reduced from 96 to 32" in line for line in info.decided)
    with pytest.raises(ConfigError, match="num_kv_blocks"):
        build_runner(config(tiny_folder, num_kv_blocks=3, max_model_len=64))


def test_the_factors_of_longrope_are_said_and_are_part_of_the_numerics(tiny_folder: Path, tmp_path: Path) -> None:
    """Engines that differ in them compute other keys: no stream of one goes on at the other."""
    fields = json.loads((tiny_folder / "config.json").read_text())
    pairs = fields.get("head_dim", fields["hidden_size"] // fields["num_attention_heads"]) // 2
    scaling = {"rope_type": "longrope", "short_factor": [1.0] * pairs, "long_factor": [2.0] * pairs}
    fields = {**fields, "rope_parameters": None, "rope_scaling": {**scaling, "original_max_position_embeddings": 40}}
    (tmp_path / "config.json").write_text(json.dumps(fields))
    long, short = (build_runner(config(tmp_path, load_format="dummy", max_model_len=length))[1] for length in (41, None))
    assert long.numerics["LongRoPE"] == "long factors for all sequences, max_model_len is above 40"
    assert f"LongRoPE: {short.numerics['LongRoPE']}" in short.decided
    assert short.numerics["LongRoPE"].startswith("short factors, max_model_len is at most 40; a larger one takes the long factors")
    assert short.max_model_len == 40
    assert long.digests["model"] != short.digests["model"]
    assert "LongRoPE" not in build_runner(config(tiny_folder))[1].numerics


def test_a_context_that_linear_scaling_made_longer_is_said(tiny_folder: Path, tmp_path: Path) -> None:
    """deepseek-coder counts the factor in max_position_embeddings, vicuna does not, and config.json does not tell them apart."""
    fields = json.loads((tiny_folder / "config.json").read_text())
    fields |= {"rope_parameters": None, "rope_scaling": {"type": "linear", "factor": 2.0}}
    (tmp_path / "config.json").write_text(json.dumps(fields))
    long, short = (build_runner(config(tmp_path, load_format="dummy", max_model_len=length))[1] for length in (None, CONTEXT))
    (line,) = [line for line in long.decided if line.startswith("linear scaling")]
    assert f"{CONTEXT} positions x factor 2;" in line
    assert f"set max_model_len to {CONTEXT}" in line
    assert not any(line.startswith("linear scaling") for line in short.decided)


def test_a_gpu_that_is_not_there_is_refused(tiny_folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    with pytest.raises(ConfigError, match="torch sees no GPU"):
        build_runner(config(tiny_folder, device="cuda"))


@pytest.mark.parametrize(
    ("said", "words"),
    [
        ("CUDA out of memory. Tried to allocate 64.00 MiB. GPU 0 has a total capacity", r"kv_cache_bytes: .* Use at most 483,655,680,"),
        ("CUDA out of memory. Tried to allocate 2.50 GiB. GPU 0 has a total capacity", "Use a smaller one, a smaller max_num_seqs"),
    ],
)
def test_memory_that_runs_out_at_start_names_what_would_fit(
    said: str, words: str, tiny_folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def warm_up(*args: object, **kwargs: object) -> None:
        raise torch.OutOfMemoryError(said)

    monkeypatch.setattr(runner_build, "warm_up", warm_up)
    monkeypatch.setattr(loading, "allocate_kv", lambda *args: KvCache.__new__(KvCache))
    monkeypatch.setattr(runner_build, "_make_runner", lambda *args: SimpleNamespace(close=lambda: closed.append(True)))
    closed: list[bool] = []
    with pytest.raises(ConfigError, match=words):
        build_runner(config(tiny_folder, num_kv_blocks=200_000))
    assert closed == [True]


@pytest.mark.socket
def test_a_warm_up_that_fails_ends_the_thread(tiny_folder: Path) -> None:
    before = threading.active_count()
    with armed("runner.forward"), pytest.raises(Injected):
        build_runner(config(tiny_folder, depth=2))
    assert threading.active_count() == before


@pytest.mark.parametrize(
    ("kernels", "line"), [("reference", "draw: plain NumPy, slow for large vocabularies"), ("numba", "draw: compiled")]
)
def test_who_draws_tokens_is_said(tiny_folder: Path, kernels: str, line: str) -> None:
    if kernels == "numba":
        pytest.importorskip("numba")
    assert line in build_runner(config(tiny_folder, kernels=kernels))[1].decided
