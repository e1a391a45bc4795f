"""Tests that reading begins before torch is imported, for configurations that packed weights are kept for, and within bounds."""

from __future__ import annotations

import subprocess
import sys
import threading
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from headrace.bundled import DEFAULT_MODEL, bundled_path
from headrace.core.parallelism import Parallelism
from headrace.engine import build as module
from headrace.engine.build import WRITER, build_engine, build_served_engine, read_ahead
from headrace.engine.config import EngineConfig
from headrace.engine.loop import Engine, Outbox
from headrace.machine.resources import Available
from headrace.tensor.host.unfinished import UNFINISHED
from headrace.tensor.packed import store as packed_store
from headrace.tensor.packed.file import NOTE_SUFFIX, PackedFile, PackedFolder

pytestmark = pytest.mark.socket

CONFIG = EngineConfig(model=str(bundled_path(DEFAULT_MODEL)), quantization="int8", num_kv_blocks=16, max_model_len=64).checked()


@pytest.fixture
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setattr(module, "packed_directory", lambda: tmp_path)
    monkeypatch.setattr(packed_store, "MIN_BYTES", 0)
    monkeypatch.setattr(module, "REST_S", 0.0)
    monkeypatch.setattr("headrace.tensor.kernels.Backend.limit_threads", lambda self, num_threads: "none")  # of the whole process
    return tmp_path


@pytest.fixture
def opened(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Threads of every file that is opened: 1 when it is read ahead."""
    found: list[int] = []
    original = PackedFile.__init__

    def spy(self: PackedFile, path: Path, num_threads: int) -> None:
        found.append(num_threads)
        original(self, path, num_threads)

    monkeypatch.setattr(PackedFile, "__init__", spy)
    return found


@pytest.mark.process
def test_nothing_of_it_imports_torch() -> None:
    code = "import sys, headrace.engine.build; print('torch' in sys.modules, 'numpy' in sys.modules)"
    done = subprocess.run([sys.executable, "-c", code], stdout=subprocess.PIPE, text=True, check=True)
    assert done.stdout.split() == ["False", "False"]


def started(config: EngineConfig) -> None:
    """An engine, and what it keeps on disk is there."""
    build_engine(config, lambda updates: None)
    for thread in threading.enumerate():
        if thread.name == WRITER:
            thread.join()


@pytest.mark.parametrize("build", [build_engine, build_served_engine])
def test_an_engine_that_had_no_idle_time_writes_at_its_end_where_a_program_waits_for_it(
    cache: Path, monkeypatch: pytest.MonkeyPatch, build: Callable[[EngineConfig, Outbox], Engine]
) -> None:
    monkeypatch.setattr(module, "REST_S", 1e9)
    engine = build(CONFIG, lambda updates: None)
    writer = next(thread for thread in threading.enumerate() if thread.name == WRITER)
    assert writer.daemon == (build is build_served_engine), "a process is not held up"
    engine.stop()
    engine.run()
    writer.join()
    assert len(list(cache.glob("*.safetensors"))) == (build is build_engine)
    assert not list(cache.glob("*" + UNFINISHED))


def test_the_second_start_opens_the_file_once_and_ahead(cache: Path, opened: list[int]) -> None:
    started(CONFIG)
    assert opened == []
    started(CONFIG)
    assert opened == [1]


@pytest.mark.parametrize("change", [{"quantization": "int4"}, {"dtype": "bfloat16"}, {"num_threads": 1}, {"kernels": "numba"}])
def test_another_configuration_has_a_note_of_its_own(cache: Path, opened: list[int], change: dict[str, Any]) -> None:
    started(CONFIG)
    read_ahead(replace(CONFIG, **change))
    assert opened == []
    started(replace(CONFIG, **change))
    assert len(list(cache.glob("*" + NOTE_SUFFIX))) == 2


@pytest.mark.parametrize("change", [{"kernels": "reference"}, {"load_format": "dummy"}, {"device": "cuda"}])
def test_where_nothing_is_kept_nothing_is_read(cache: Path, change: dict[str, Any]) -> None:
    assert read_ahead(replace(CONFIG, **change)) is None
    assert list(cache.iterdir()) == []


def test_no_more_than_a_half_of_the_memory_is_taken_ahead(cache: Path, opened: list[int], monkeypatch: pytest.MonkeyPatch) -> None:
    started(CONFIG)
    [file] = cache.glob("*.safetensors")
    size = file.stat().st_size
    monkeypatch.setattr(module, "read_available", lambda: Available(2 * size - 2, "a test"))
    read_ahead(CONFIG)
    assert opened == []
    monkeypatch.setattr(module, "read_available", lambda: Available(2 * size, "a test"))
    folder = read_ahead(CONFIG)
    assert opened == [1]
    assert folder is not None
    folder.drop()


def test_ranks_take_a_half_of_the_memory_together(cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    limits: list[int] = []
    monkeypatch.setattr(module, "read_available", lambda: Available(6000, "a test"))
    monkeypatch.setattr(PackedFolder, "read_ahead", lambda folder, max_bytes: limits.append(max_bytes))
    for rank in range(3):
        read_ahead(replace(CONFIG, tensor_parallel_size=3), Parallelism(3).place(rank))
    assert limits == [1000] * 3


def test_a_start_that_is_refused_stops_reading(cache: Path, opened: list[int], monkeypatch: pytest.MonkeyPatch) -> None:
    started(CONFIG)
    dropped: list[Path] = []
    original = PackedFile.drop

    def spy(self: PackedFile) -> None:
        dropped.append(self.path)
        original(self)

    monkeypatch.setattr(PackedFile, "drop", spy)
    monkeypatch.setattr("headrace.engine.runner.loading.plan_threads", lambda requested: 1 / 0)
    with pytest.raises(ZeroDivisionError):
        started(CONFIG)
    assert opened == [1]
    assert len(dropped) == 1
