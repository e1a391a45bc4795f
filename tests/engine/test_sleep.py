"""Tests that an engine which slept answers as one that did not, and that the memory it names is given back meanwhile."""

from __future__ import annotations

import threading
from pathlib import Path

import pytest
from figures import Figure
from real_engine import Answers, RealEngine, greedy_request

from headrace.bundled import DEFAULT_MODEL, bundled_path
from headrace.core.errors import ConfigError, EngineFatal
from headrace.core.sleep import SleepLevel
from headrace.core.speculation import SpeculativeConfig
from headrace.engine import build as module
from headrace.engine.build import WRITER
from headrace.machine.resources import process_memory
from headrace.tensor.host.file_memory import StoredMemory
from headrace.tensor.packed import store

pytestmark = pytest.mark.socket

FOUND = bundled_path(DEFAULT_MODEL)
assert FOUND is not None
MODEL = FOUND
OPTIONS = {"num_kv_blocks": 64, "max_model_len": 64, "quantization": "int8"}


@pytest.fixture
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setattr(module, "packed_directory", lambda: tmp_path)
    monkeypatch.setattr(store, "MIN_BYTES", 0)
    monkeypatch.setattr(module, "REST_S", 0.0)
    return tmp_path


@pytest.fixture
def dropped(monkeypatch: pytest.MonkeyPatch) -> list[StoredMemory]:
    """What was given back of weights, by each sleep."""
    found: list[StoredMemory] = []
    give_back = StoredMemory.give_back

    def spy(self: StoredMemory) -> None:
        found.append(self)
        give_back(self)

    monkeypatch.setattr(StoredMemory, "give_back", spy)
    return found


def written() -> None:
    for thread in threading.enumerate():
        if thread.name == WRITER:
            thread.join()


def ask(engine: RealEngine, level: SleepLevel | None) -> None:
    change = engine.engine.change_sleep(level)
    while not change.done():
        if not engine.engine.turn():
            engine.engine.idle()
    change.result()


def answers(engine: RealEngine, name: str) -> Answers:
    prompts = [[5, 6, 7, 8, 9, 10, 11, 12, 13], list(range(20, 50))]
    engine.run(
        *(greedy_request(f"{name} {index}", prompt, logprobs=2) for index, prompt in enumerate(prompts)),
        *(greedy_request(f"{name} drawn {index}", prompt, temperature=0.9, seed=3, n=2) for index, prompt in enumerate(prompts)),
    )
    return {(key[0].removeprefix(name), key[1]): answer for key, answer in engine.answers().items() if key[0].startswith(name)}


@pytest.mark.parametrize("is_first_start", [True, False])
def test_an_engine_that_slept_answers_as_one_that_did_not(cache: Path, dropped: list[StoredMemory], is_first_start: bool) -> None:
    with RealEngine(MODEL, **OPTIONS) as plain:
        written()
        expected = answers(plain, "plain")
        engine = plain if is_first_start else RealEngine(MODEL, **OPTIONS)
        try:
            assert answers(engine, "awake") == expected
            for level in SleepLevel:
                ask(engine, level)
                engine.run(greedy_request("early", [1, 2, 3]))
                assert str(engine.refused.pop("early")) == "this replica is asleep"
                ask(engine, None)
                assert answers(engine, level.value) == expected
                assert engine.cached[f"{level.value} 1"] == 0, "its KV was given back"
        finally:
            if engine is not plain:
                engine.__exit__(None, None, None)
    [weights] = dropped
    assert weights.num_bytes > 100_000


def test_weights_that_were_dropped_are_gone_until_they_are_read_again(cache: Path, dropped: list[StoredMemory]) -> None:
    with RealEngine(MODEL, **OPTIONS):
        written()
    with RealEngine(MODEL, **OPTIONS) as engine:
        ask(engine, SleepLevel.DISK)
        [weights] = dropped
        [(memory, _)] = weights.regions
        page = 4096
        assert not any(memory[page : len(memory) - page]), "the system gives zeros for a page that it took back"
        for path in cache.glob("*.safetensors"):
            path.unlink()
        ask(engine, None)
        assert any(memory[page : len(memory) - page]), "the file stays open, whatever becomes of its name"


def test_an_engine_without_packed_weights_on_disk_sleeps_in_ram_alone(cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "REST_S", 1e9)
    with RealEngine(MODEL, **OPTIONS) as engine:
        with pytest.raises(ConfigError, match="level: the packed weights of this engine are not on disk, or not yet"):
            ask(engine, SleepLevel.DISK)
        assert not engine.engine.snapshot().is_asleep
        ask(engine, SleepLevel.RAM)
        ask(engine, None)
        assert answers(engine, "a")


def test_weights_that_cannot_be_read_again_end_the_engine(cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with RealEngine(MODEL, **OPTIONS) as engine:
        written()
        ask(engine, SleepLevel.DISK)
        for path in cache.glob("*.safetensors"):
            with path.open("r+b") as file:
                file.truncate(1000)
        with pytest.raises(EngineFatal, match=r"packed weights cannot be read again \(the file became shorter"):
            ask(engine, None)


def test_what_does_not_sleep_says_so(cache: Path) -> None:
    drafting = SpeculativeConfig(method="draft_model", model=str(bundled_path("headrace-draft")))
    for options, reason in (({"speculative_config": drafting}, "an engine with a draft model"), ({"tensor_parallel_size": 2}, "ranks")):
        with RealEngine(MODEL, **{**OPTIONS, **options}) as engine, pytest.raises(ConfigError, match=reason):
            ask(engine, SleepLevel.RAM)


def test_memory_bytes_bounds_weights_cache_and_steps_together() -> None:
    """The cache gets all of the rest, and what does not fit is refused before weights are read."""
    sized = {**OPTIONS, "num_kv_blocks": None, "max_num_seqs": 64, "max_model_len": 2048}
    taken = {}
    for memory_bytes in (240 << 20, 248 << 20):
        with RealEngine(MODEL, **sized, memory_bytes=memory_bytes) as engine:
            info = engine.engine.info
            taken[memory_bytes] = sum(
                count * group.block_bytes(info.block_size) for count, group in zip(info.num_blocks, info.kv_groups, strict=True)
            )
            assert any(line.startswith("KV memory: 1 x (") and "free by memory_bytes" in line for line in info.decided)
    small, large = taken.values()
    assert 0 < small < 240 << 20
    assert large - small == pytest.approx(8 << 20, abs=1 << 16)
    with pytest.raises(ConfigError, match=r"model: .* of bfloat16 weights do not fit the 1\.00 MiB that memory_bytes leaves"):
        RealEngine(MODEL, **sized, memory_bytes=1 << 20)


@pytest.mark.timing
def test_the_memory_of_a_full_cache_goes_back_to_the_system(cache: Path, figure: Figure) -> None:
    with RealEngine(MODEL, **{**OPTIONS, "num_kv_blocks": 40_000, "max_num_seqs": 256, "max_num_batched_tokens": 2048}) as engine:
        written()
        before = process_memory().anonymous
        engine.run(*(greedy_request(f"r{index}", [index % 90 + 1, *range(1, 48)]) for index in range(1000)))
        used = process_memory().anonymous - before
        ask(engine, SleepLevel.RAM)
        kept = process_memory().anonymous - before
        assert used > 10 << 20
        figure("kept of what the cache and the steps took", kept / used, 0.1, "of it")
