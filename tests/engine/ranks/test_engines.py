"""Tests whole engines of several ranks, each in a thread of this process, against an engine of one: real loader, loop, runner and links.

With tensor parallelism sums have another order, so that log-probabilities are compared closely, and with stages alone to the bit. All that
a client may ask for, preempted and cut off, is in tests/engine/test_random_requests.py.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from gguf_files import bundled_gguf
from random_speculation import decide_at_random
from rank_answers import CROWDED, SPACE, answers, requests
from real_engine import RealEngine, check_close, greedy_request
from tiny_models import save_tiny_model

from headrace.bundled import DRAFT_MODEL as DRAFT
from headrace.bundled import bundled_path
from headrace.core.errors import ConfigError, EngineFatal
from headrace.core.speculation import DRAFT_MODEL, NGRAM, SpeculativeConfig
from headrace.engine.config import EngineConfig
from headrace.engine.kv_sizing import KvSizing
from headrace.engine.ranks.leader import LeadingKv
from headrace.engine.ranks.member import RankMember
from headrace.engine.runner import loading
from headrace.engine.runner.build import build_runner
from headrace.engine.runner.loading import LoadedPart
from headrace.fleet.weights import resolve_model
from headrace.machine.resources import Available
from headrace.tensor.device import CPU
from headrace.tensor.models import LoadedModel, describe, load_model
from headrace.tensor.models.decoder import DecoderModel

pytest.importorskip("headrace.tensor.kernels.cpu.backend")  # now, so that no test moves where its compiled kernels are kept
pytestmark = pytest.mark.socket

TP2, PP2 = {"tensor_parallel_size": 2}, {"pipeline_parallel_size": 2}
LAYOUTS = [{**TP2, "depth": 2}, PP2, {"pipeline_parallel_size": 3}, {**TP2, **PP2}]
MAX_WAKES = 200
"""Of an idle loop, five a second."""


@pytest.mark.parametrize("layout", LAYOUTS, ids=["tp 2", "pp 2", "pp 3", "tp 2 pp 2"])
@pytest.mark.parametrize("model", ["llama", "gemma3"])
def test_several_ranks_answer_as_one_does(tmp_path: Path, layout: dict[str, int], model: str) -> None:
    """Windows of Gemma 3 make KV groups of which a stage may have no layer."""
    folder = save_tiny_model(model, tmp_path, num_hidden_layers=3)
    expected, _ = answers(folder)
    found, num_preempted = answers(folder, **layout, **CROWDED)
    check_close(found, expected)
    assert num_preempted > 0


@pytest.mark.parametrize("layout", [TP2, PP2], ids=["tp 2", "pp 2"])
def test_a_block_that_several_sequences_share_is_copied_on_all_ranks(
    tmp_path: Path, layout: dict[str, int], monkeypatch: pytest.MonkeyPatch
) -> None:
    copied: list[tuple[int, ...]] = []
    copy_block = LeadingKv.copy_block

    def note(self: LeadingKv, *block: int) -> None:
        copied.append(block)
        copy_block(self, *block)

    monkeypatch.setattr(LeadingKv, "copy_block", note)
    folder = save_tiny_model("llama", tmp_path)
    asked = greedy_request("r", range(3, 21), n=3, temperature=1.0, logprobs=1, max_tokens=12)
    found = []
    for options in ({}, layout):
        with RealEngine(folder, **SPACE, **options) as engine:
            found.append(engine.run(asked).answers())
    check_close(found[1], found[0])
    assert len(copied) >= 2


@pytest.mark.parametrize("is_whole", [False, True], ids=["parts of experts", "whole experts"])
def test_experts_are_divided(tmp_path: Path, is_whole: bool) -> None:
    folder = save_tiny_model("qwen3-moe", tmp_path)
    found, _ = answers(folder, **TP2, enable_expert_parallel=is_whole)
    check_close(found, answers(folder)[0])


@pytest.mark.parametrize("layout", [TP2, PP2], ids=["tp 2", "pp 2"])
@pytest.mark.parametrize("method", [NGRAM, DRAFT_MODEL])
def test_drafts_are_verified_on_all_ranks(method: str, layout: dict[str, int]) -> None:
    folder = bundled_path("headrace-tiny")
    assert folder is not None
    drafting = SpeculativeConfig(method=method, model=str(bundled_path(DRAFT)) if method == DRAFT_MODEL else "", num_speculative_tokens=3)
    config: dict[str, Any] = {"load_format": "auto", "max_model_len": 300}
    asked = greedy_request("r", [5, 6, 7, 8, 9, 10] * 12, max_tokens=40, logit_bias={7: 9.0})  # a token that comes again and again
    with RealEngine(folder, **{**SPACE, **config}) as engine:
        expected = engine.run(asked).answer("r")
    with RealEngine(folder, **{**SPACE, **config, **layout, "speculative_config": drafting}) as engine:
        decide_at_random(engine.engine.scheduler, 0)
        assert engine.run(asked).answer("r") == expected
        assert engine.engine.snapshot().counters.draft_tokens > 0


@pytest.mark.parametrize("layout", [PP2, TP2], ids=["pp 2", "tp 2"])
def test_a_quantized_checkpoint_is_the_same_one_on_all_ranks(
    tmp_path: Path, layout: dict[str, int], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its digest in one engine names in how many bits the linears are held, of which a stage has some."""
    folder = bundled_path("headrace-tiny")
    assert folder is not None
    monkeypatch.setenv("HEADRACE_CACHE_DIR", str(tmp_path))
    stored = resolve_model(str(bundled_gguf(folder, tmp_path / "tiny.gguf", "Q8_0")))
    config = {**SPACE, "kernels": "auto", "load_format": "auto"}
    asked = greedy_request("r", [5, 6, 7, 8], max_tokens=12)
    with RealEngine(stored, **config) as engine:
        expected = engine.run(asked).answer("r")
    with RealEngine(stored, **{**config, **layout}) as engine:
        assert engine.run(asked).answer("r") == expected


def test_a_rank_holds_its_part_and_the_same_memory_has_room_for_more_blocks(tmp_path: Path) -> None:
    folder, room = save_tiny_model("llama", tmp_path), {"num_kv_blocks": None, "kv_cache_bytes": 1 << 18}
    facts = []
    for layout in ({}, TP2, PP2):
        with RealEngine(folder, **{**SPACE, **room, **layout}) as engine:
            engine.run(*requests())
            facts.append(engine.engine.info)
    alone, halves, _ = facts
    assert halves.num_blocks[0] > 1.9 * alone.num_blocks[0]
    assert [any("rank 1: " in line for line in each.decided) for each in facts] == [False, True, True]
    assert ["ranks" in each.numerics for each in facts] == [False, True, False], "stages give the same bits"


def test_ranks_have_the_cache_that_one_rank_has_although_the_free_memory_falls_as_they_load(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A rank took the free memory for what all but its own weights leave: a model that one rank served was refused."""
    folder, held, load = save_tiny_model("llama", tmp_path), list[int](), load_model
    options = {**SPACE, "num_kv_blocks": None, "memory_fraction": 0.9, "max_num_seqs": 64, "max_num_batched_tokens": 64}
    free = 2 * describe(folder).resident_bytes + (4 << 20)

    def note(*arguments: Any, **its: Any) -> LoadedModel:
        loaded = load(*arguments, **its)
        held.append(loaded.resident_bytes)
        return loaded

    monkeypatch.setattr(loading, "load_model", note)
    monkeypatch.setattr(CPU, "free_memory", lambda: Available(free - sum(held), "a test"))
    counts = []
    for layout in ({}, {**TP2, "memory_fraction": 0.45}):
        held.clear()
        with RealEngine(folder, **{**options, **layout}) as engine:
            counts.append(engine.engine.info.num_blocks[0])
    alone, divided = counts
    a_step, block = 4 * 32 * 64 * 128, 2 * 1024  # hidden states of 64 tokens; a block of both ranks
    assert alone - divided == pytest.approx(a_step / block, abs=2), "all but what the second rank reserves for a step of its own"
    assert any(line.startswith("ranks: 1 stage of 2 ranks; rank 0: ") for line in engine.engine.info.decided)


@pytest.mark.parametrize("layout", [TP2, PP2], ids=["TP2", "PP2"])
def test_no_rank_takes_more_than_memory_bytes(tmp_path: Path, layout: dict[str, int]) -> None:
    folder = save_tiny_model("llama", tmp_path)
    options = {**SPACE, "num_kv_blocks": None, "max_num_seqs": 64, "max_num_batched_tokens": 64}
    most = describe(folder).resident_bytes + (1 << 20)
    with RealEngine(folder, **options, **layout, memory_bytes=most) as engine:
        info = engine.engine.info
    cache = sum(count * group.block_bytes(info.block_size) for count, group in zip(info.num_blocks, info.kv_groups, strict=True))
    assert most // 8 < cache < most, "and it takes what is left"
    assert any(line.startswith("KV memory: 0.5 x (") and "free by memory_bytes" in line for line in info.decided), info.decided


def test_the_rank_with_the_least_memory_decides_the_number_of_blocks(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    size = LoadedPart.size

    def less_on_rank_1(self: LoadedPart, *arguments: Any, most: int | None = None) -> KvSizing:
        found = size(self, *arguments, most=most)
        return replace(found, num_full_blocks=60) if self.loaded.model.place.rank == 1 and most is None else found

    monkeypatch.setattr(LoadedPart, "size", less_on_rank_1)
    with RealEngine(save_tiny_model("llama", tmp_path), **SPACE, **TP2) as engine:
        info = engine.run(*requests()).engine.info
    assert info.num_blocks == (60,)
    assert any("rank 1: " in line and "60 blocks fit" in line for line in info.decided), info.decided


def failing(error: Exception) -> Callable[..., Any]:
    def fail(*_: object) -> Any:
        raise error

    return fail


def test_a_rank_that_fails_in_a_step_ends_the_replica_with_its_reason(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = save_tiny_model("llama", tmp_path)
    engine = RealEngine(folder, **SPACE, **TP2)
    engine.run(greedy_request("before", [1, 2, 3]))
    monkeypatch.setattr(RankMember, "_compute_logits", failing(MemoryError("no more")))
    with pytest.raises(EngineFatal, match=r"rank 1 failed: MemoryError\('no more'\)"):
        engine.run(greedy_request("after", [1, 2, 3]))
    end(engine)
    assert isinstance(engine.ranks.errors[1], MemoryError)


def test_a_failure_of_rank_0_within_a_step_ends_the_others(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = save_tiny_model("llama", tmp_path)
    engine = RealEngine(folder, **SPACE, **TP2)
    forward = DecoderModel.forward

    def fail_on_rank_0(self: DecoderModel, *arguments: Any) -> Any:
        if self.place.rank == 0:
            raise MemoryError("no more")
        return forward(self, *arguments)

    monkeypatch.setattr(DecoderModel, "forward", fail_on_rank_0)
    with pytest.raises(EngineFatal, match="rank 0 failed within a step: MemoryError"):
        engine.run(greedy_request("r", [1, 2, 3]))
    end(engine)
    assert isinstance(engine.ranks.errors[1], EngineFatal)


def test_an_idle_engine_ends_once_a_rank_has_left(tmp_path: Path) -> None:
    engine = RealEngine(save_tiny_model("llama", tmp_path), **SPACE, **TP2)
    engine.run(greedy_request("r", [1, 2, 3]))
    engine.ranks.leave(1)
    with pytest.raises(EngineFatal, match="rank 1"):
        rest(engine)
    end(engine)
    assert isinstance(engine.ranks.errors[1], EngineFatal)


def rest(engine: RealEngine) -> None:
    for _ in range(MAX_WAKES):
        engine.engine.idle()


def end(engine: RealEngine) -> None:
    """As the loop that died would."""
    engine.engine.closing.close()
    engine.ranks.join()


def test_a_command_that_starts_one_process_refuses_several_ranks(tmp_path: Path) -> None:
    folder = save_tiny_model("llama", tmp_path)
    with pytest.raises(ConfigError, match="tensor_parallel_size or pipeline_parallel_size: this command starts one process"):
        build_runner(EngineConfig(model=str(folder), **{**SPACE, **TP2}))
