"""Tests adapters in engines of several ranks, each in a thread of this process, against an engine of one, and what a rank does that cannot
load its part.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future, wait
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
from adapter_kit import ALL, save_adapter
from patience import PATIENCE_S
from random_speculation import decide_at_random
from real_engine import MAX_TURNS, Answers, RealEngine, check_close, greedy_request
from tiny_models import save_tiny_model

from headrace.bundled import DEFAULT_MODEL, bundled_adapter, bundled_path
from headrace.bundled import DRAFT_MODEL as DRAFT
from headrace.core import regular_files
from headrace.core.adapters import AdapterSource
from headrace.core.errors import CheckpointError, Unavailable
from headrace.core.regular_files import FileThread
from headrace.core.request import EngineRequest
from headrace.core.speculation import DRAFT_MODEL, NGRAM, SpeculativeConfig
from headrace.engine.kv_sizing import KvMemoryBudget, KvSizing, size_kv
from headrace.engine.ranks.adapters import ZEROS, MemberAdapters
from headrace.engine.ranks.link import RankLink
from headrace.engine.runner import loading
from headrace.tensor.adapters.loader import AdapterLoader
from headrace.tensor.batch import PackedAdapter

pytest.importorskip("headrace.tensor.kernels.cpu.backend")  # now, so that no test moves where its compiled kernels are kept
pytestmark = pytest.mark.socket

TP2, TP4, PP2 = {"tensor_parallel_size": 2}, {"tensor_parallel_size": 4}, {"pipeline_parallel_size": 2}
LAYOUTS = {"tp 2": TP2, "tp 4": TP4, "pp 2": PP2, "tp 2 pp 2": {**TP2, **PP2}}
SPACE: dict[str, Any] = {
    "kernels": "reference", "device": "cpu", "max_model_len": 200, "load_format": "dummy", "seed": 3, "enable_lora": True,
    "max_lora_rank": 6,
}  # fmt: skip
CROWDED: dict[str, Any] = {"num_kv_blocks": 70, "max_num_batched_tokens": 24, "max_loras": 2}


def crowded(layout: dict[str, int]) -> dict[str, Any]:
    """With two steps in flight, as stages have by themselves."""
    return CROWDED | layout | ({} if "pipeline_parallel_size" in layout else {"depth": 2})


NAMES = ("a", "b", "c")


def save_sources(base: Path) -> tuple[AdapterSource, ...]:
    folders = (
        save_adapter(base / "a", base, 1, 4, ALL),
        save_adapter(base / "b", base, 2, 6, ("o_proj", "down_proj", "v_proj"), use_rslora=True),
        save_adapter(base / "c", base, 3, 1, ("q_proj", "up_proj", "qkv_proj"), size=2.0),
    )
    return tuple(AdapterSource(name=name, path=str(folder)) for name, folder in zip(NAMES, folders, strict=True))


def asked(engine: RealEngine, name: str, adapter: str | None, prompt: list[int], **changes: Any) -> EngineRequest:
    digest = engine.engine.info.adapters[adapter] if adapter else ""
    return greedy_request(name, prompt, adapter=adapter, adapter_digest=digest, **changes)


def everything(engine: RealEngine) -> list[EngineRequest]:
    """Of the base model and each adapter: a long prompt, a sampled answer, and log-probabilities."""
    shapes: list[tuple[int, dict[str, Any]]] = [(70, {"logprobs": 1}), (9, {"temperature": 1.0, "n": 2}), (30, {"prompt_logprobs": 1})]
    return [
        asked(engine, f"{adapter} {number}", adapter, [(7 * number + 11 * at) % 500 + 3 for at in range(length)], seed=number, **shape)
        for number, (length, shape) in enumerate(shapes)
        for adapter in (None, *NAMES)
    ]


def answers(folder: Path, sources: tuple[AdapterSource, ...], **config: Any) -> Answers:
    with RealEngine(folder, **{**SPACE, "lora_modules": sources, **config}) as engine:
        engine.run(*everything(engine))
        assert not engine.ranks.errors
        return engine.answers()


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("model", ["llama", "gemma3", "qwen3-moe"])
def test_rows_of_several_adapters_and_of_the_base_model_are_answered_as_by_one_rank(tmp_path: Path, layout: str, model: str) -> None:
    """In two places, so that adapters are loaded and dropped while others run. Four ranks hold each of two KV heads twice."""
    folder = save_tiny_model(model, tmp_path)
    sources = save_sources(folder)
    expected = answers(folder, sources, max_loras=3)
    assert len({expected[f"{adapter} 0", 0].logprobs[0].logprob for adapter in (None, *NAMES)}) == 4
    check_close(answers(folder, sources, **crowded(LAYOUTS[layout])), expected)


@pytest.mark.parametrize("layout", [TP2, PP2], ids=["tp 2", "pp 2"])
def test_compiled_kernels_compute_the_adapters_of_ranks(tmp_path: Path, layout: dict[str, int]) -> None:
    """Stages give the bits of one process."""
    folder = save_tiny_model("llama", tmp_path)
    sources, compiled = save_sources(folder), {"kernels": "auto", "deterministic": True}
    found, expected = answers(folder, sources, **crowded(layout), **compiled), answers(folder, sources, **compiled)
    check_close(found, expected)
    assert (found == expected) == (layout == PP2)


@pytest.mark.parametrize("method", [NGRAM, DRAFT_MODEL])
def test_drafts_of_rows_with_adapters_are_verified_on_all_ranks(method: str) -> None:
    folder, adapters = bundled_path(DEFAULT_MODEL), {name: bundled_adapter(name) for name in ("pirate", "hardware-shop")}
    assert folder is not None
    drafting = SpeculativeConfig(method=method, model=str(bundled_path(DRAFT)) if method == DRAFT_MODEL else "", num_speculative_tokens=3)
    config: dict[str, Any] = {**SPACE, "load_format": "auto", "max_model_len": 300, "max_lora_rank": 16}
    config["lora_modules"] = tuple(AdapterSource(name=name, path=str(path)) for name, path in adapters.items())
    found = []
    for options in ({}, {**TP2, "speculative_config": drafting}):
        with RealEngine(folder, **{**config, **options}) as engine:
            if options:
                decide_at_random(engine.engine.scheduler, 0)
            for name in (None, *adapters):
                engine.submit(asked(engine, str(name), name, [5, 6, 7, 8, 9, 10] * 12, max_tokens=40, logit_bias={7: 9.0}))
            found.append({key: answer.token_ids for key, answer in engine.run().answers().items()})
    assert found[1] == found[0]
    assert engine.engine.snapshot().counters.draft_tokens > 0


def test_an_adapter_that_is_loaded_anew_answers_with_its_new_weights_on_all_ranks(tmp_path: Path) -> None:
    """What runs keeps the old ones, of which every rank then has two."""
    folder = save_tiny_model("llama", tmp_path)
    sources, prompt = save_sources(folder), [5, 6, 7, 8]
    found: list[Answers] = []
    for layout in ({}, {**TP2, **PP2}):
        save_sources(folder)
        with RealEngine(folder, **SPACE, **layout, lora_modules=sources, max_loras=2) as engine:
            engine.run(asked(engine, "before", "a", prompt))
            engine.submit(asked(engine, "runs", "a", prompt, max_tokens=30))
            while not engine.tokens["runs", 0]:
                engine.engine.turn()
            save_adapter(Path(sources[0].path), folder, 7, 4, ALL)
            engine.engine.set_adapters(sources)
            engine.run(asked(engine, "after", "a", prompt), asked(engine, "other", "b", prompt))
            assert engine.answer("runs")[:16] == engine.answer("before") != engine.answer("after")
            found.append(engine.answers())
    check_close(found[1], found[0])


class Reads:
    """What members read.

    before      called with the folder, before each read
    most_parts  that a member had at the end of a read
    """

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.gate, self.num_waiting = threading.Event(), threading.Semaphore(0)
        self.gate.set()
        self.before: Callable[[Path], None] = lambda folder: None
        self.members: list[MemberAdapters] = []
        self.most_parts = 0
        make = MemberAdapters.__init__

        def made(member: MemberAdapters, loader: AdapterLoader, link: RankLink) -> None:
            load = loader.load

            def load_soon(folder: Path, digest: str) -> PackedAdapter:
                self.num_waiting.release()
                assert self.gate.wait(PATIENCE_S)
                self.before(folder)
                part = load(folder, digest)
                self.most_parts = max(self.most_parts, len(member.parts))
                return part

            monkeypatch.setattr(loader, "load", load_soon)
            make(member, loader, link)
            self.members.append(member)

        monkeypatch.setattr(MemberAdapters, "__init__", made)


@pytest.fixture
def reads(monkeypatch: pytest.MonkeyPatch) -> Reads:
    return Reads(monkeypatch)


def turn_until(engine: RealEngine, condition: Callable[[], bool]) -> None:
    for _ in range(MAX_TURNS):
        if condition():
            return
        if not engine.engine.turn():
            engine.engine.idle()
    raise AssertionError("it did not come to pass")


@contextmanager
def served(tmp_path: Path, **config: Any) -> Iterator[RealEngine]:
    folder = save_tiny_model("llama", tmp_path)
    with RealEngine(folder, **{**SPACE, "lora_modules": save_sources(folder), "max_loras": 1, **TP2, **config}) as engine:
        yield engine
        assert not engine.ranks.errors


def test_steps_go_on_while_a_member_reads_and_the_adapter_waits_for_it(tmp_path: Path, reads: Reads) -> None:
    with served(tmp_path) as engine:
        reads.gate.clear()
        engine.submit(asked(engine, "adapted", "a", [1, 2, 3]))
        engine.submit(greedy_request("base", [1, 2, 3], max_tokens=40))
        turn_until(engine, lambda: reads.num_waiting.acquire(blocking=False))
        turn_until(engine, lambda: ("base", 0) in engine.finish)
        assert len(engine.answer("base")) == 40
        assert not engine.answer("adapted")
        reads.gate.set()
        engine.run()
        assert len(engine.answer("adapted")) == 16


def test_a_member_keeps_as_many_adapters_as_rank_0(tmp_path: Path, reads: Reads) -> None:
    with served(tmp_path, max_cpu_loras=2) as engine:
        for number in range(9):
            engine.run(asked(engine, f"r{number}", NAMES[number % 3], [1, 2, 3]))
    [member] = reads.members
    assert reads.most_parts == 2, "another one has been dropped before"
    assert ZEROS not in member.parts
    assert all(member.parts.values())


def refuse(folder: Path) -> None:
    raise CheckpointError(str(folder), "cannot be read (Permission denied)")


def fail(folder: Path) -> None:
    raise MemoryError("no more")


def change(folder: Path) -> None:
    with (folder / "adapter_config.json").open("ab") as file:
        file.write(b"\n")


REFUSALS = [
    (refuse, r"the adapter cannot be used: rank 1: cannot be read \(Permission denied\)"),
    (fail, "the adapter cannot be used: rank 1: it could not be loaded by a fault of this program"),
    (change, "the adapter cannot be used: rank 1: its files have changed since they were inspected"),
]


@pytest.mark.parametrize(("before", "reason"), REFUSALS, ids=["refused", "failed", "changed"])
def test_an_adapter_that_a_member_cannot_load_refuses_its_requests_alone(
    tmp_path: Path, reads: Reads, before: Callable[[Path], None], reason: str
) -> None:
    """And is loaded for the next one. "changed" is the race of a folder that is written between the reads of two ranks."""
    with served(tmp_path) as engine:
        reads.gate.clear()
        reads.before = before
        engine.submit(asked(engine, "first", "a", [1, 2, 3]), greedy_request("base", [1, 2, 3]))
        turn_until(engine, lambda: reads.num_waiting.acquire(blocking=False))
        reads.gate.set()
        engine.run()
        with pytest.raises(Unavailable, match=reason):
            raise engine.refused.pop("first")
        assert len(engine.answer("base")) == 16
        reads.before = lambda folder: None
        engine.engine.set_adapters(save_sources(tmp_path))
        engine.run(asked(engine, "again", "a", [1, 2, 3]), asked(engine, "other", "b", [1, 2, 3]))
        assert len(engine.answer("again")) == len(engine.answer("other")) == 16


def test_a_member_that_does_not_answer_is_given_up_and_what_it_reads_late_is_dropped(
    tmp_path: Path, reads: Reads, monkeypatch: pytest.MonkeyPatch
) -> None:
    is_stuck, answered = threading.Event(), threading.Event()

    def hang(folder: Path) -> None:
        if folder.name == "a" and not answered.is_set():
            is_stuck.set()
            assert answered.wait(PATIENCE_S)

    def wait_until_stuck(read: Sequence[Future[object]], limit_s: float) -> Any:
        while not (found := wait(read, 0.01)).done and not is_stuck.is_set():
            pass
        is_stuck.clear()
        return found

    monkeypatch.setattr(regular_files, "wait", wait_until_stuck)
    reads.before = hang
    with served(tmp_path) as engine:
        engine.run(asked(engine, "first", "a", [1, 2, 3]))
        assert "the adapter cannot be used: cannot be read (no answer within 50 s)" in str(engine.refused.pop("first"))
        engine.run(asked(engine, "again", "a", [1, 2, 3]), asked(engine, "other", "b", [1, 2, 3]))
        assert "an earlier read of its folder has no answer yet" in str(engine.refused.pop("again"))
        assert len(engine.answer("other")) == 16
        answered.set()
        for thread in threading.enumerate():
            if isinstance(thread, FileThread):
                thread.join(PATIENCE_S)
        engine.run(asked(engine, "late", "a", [1, 2, 3]))
        engine.run(asked(engine, "last", "c", [1, 2, 3]))
        assert len(engine.answer("late")) == len(engine.answer("last")) == 16
        [member] = reads.members
        assert len(member.parts) == 1


def test_every_rank_sets_memory_for_its_parts_aside(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """More than half on each of two: one factor of each update is whole, and so is the file that is read."""
    budgets: list[KvMemoryBudget] = []

    def note(config: Any, groups: Any, length: int, budget: KvMemoryBudget, *rest: Any) -> KvSizing:
        budgets.append(budget)
        return size_kv(config, groups, length, budget, *rest)

    monkeypatch.setattr(loading, "size_kv", note)
    sizes: dict[str, set[int]] = {}
    for name, layout in {"one": {"tensor_parallel_size": 1}, "two": TP2}.items():
        budgets.clear()
        with served(tmp_path / name, **layout, max_cpu_loras=50) as engine:
            engine.run(greedy_request("r", [1, 2, 3]))
        sizes[name] = {budget.adapter_bytes for budget in budgets}
        assert len(budgets) == (1 if name == "one" else 4)
    [whole], [part] = sizes.values()
    assert 0.5 * whole < part < 0.8 * whole
