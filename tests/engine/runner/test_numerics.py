"""Tests an engine's numerics: equal for equal starts, different for whatever changes a bit, known at a warm start."""

from __future__ import annotations

import shutil
import threading
from collections.abc import Generator, Sequence
from importlib.metadata import version
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("numba")

from headrace.bundled import bundled_path
from headrace.core.model_info import may_resume, numerics_digest, why_not_resume
from headrace.engine.build import WRITER, build_served_engine
from headrace.engine.config import EngineConfig
from headrace.tensor.backends import load_backend
from headrace.tensor.checkpoint import weights_digest

pytestmark = pytest.mark.socket

DEPENDS: dict[str, dict[str, Any]] = {
    "quantization": {"quantization": "int8"},
    "dtype": {"dtype": "bfloat16"},
    "KV dtype": {"kv_cache_dtype": "bfloat16"},
    "deterministic": {"deterministic": True},
    "kernels": {"kernels": "reference"},
}


IS_STARTED = threading.Event()
"""Weights are hashed from then on: on a busy machine it was done before the start was looked at."""


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A model of this test's own, and a cache in which nothing is."""
    bundled = bundled_path("headrace-tiny")
    assert bundled is not None
    monkeypatch.setenv("HEADRACE_CACHE_DIR", str(tmp_path / "cache"))
    monkeypatch.delenv("HEADRACE_KEEP_PACKED", raising=False)
    hashed = weights_digest._hashed

    def hashed_later(files: Sequence[Path]) -> Generator[None, None, str]:
        assert IS_STARTED.wait(60.0)
        return hashed(files)

    monkeypatch.setattr(weights_digest, "_hashed", hashed_later)
    return Path(shutil.copytree(bundled, tmp_path / "model"))


def numerics(folder: Path, **changes: Any) -> tuple[dict[str, str], dict[str, str]]:
    """As at the start, and when the weights have been hashed and packed."""
    config = EngineConfig(model=str(folder), **{"dtype": "float32", "num_threads": 1, "num_kv_blocks": 40, **changes}).checked()
    IS_STARTED.clear()
    engine = build_served_engine(config, lambda updates: None)
    first = engine.info.numerics
    IS_STARTED.set()
    for thread in threading.enumerate():
        if thread.name == WRITER:
            thread.join(60.0)
    engine.stop()
    engine.run()
    return first, engine.info.numerics


def test_a_first_start_learns_the_weights_digest_and_a_warm_one_has_it(folder: Path) -> None:
    before, learnt = numerics(folder)
    assert (before["weights"], len(learnt["weights"])) == ("", 64)
    assert why_not_resume(before, learnt) == "the weights of the first replica are not hashed yet"
    warm, last = numerics(folder)
    assert warm == last == learnt
    assert may_resume(numerics_digest(warm), numerics_digest(learnt))


@pytest.mark.parametrize("name", DEPENDS)
def test_what_changes_a_bit_is_named(folder: Path, name: str) -> None:
    _, plain = numerics(folder)
    _, other = numerics(folder, **DEPENDS[name])
    assert not may_resume(numerics_digest(plain), numerics_digest(other))
    assert name in [fact.split(":")[0] for fact in why_not_resume(plain, other).split("; ")]


def test_whatever_compiled_the_kernels_is_named_with_its_version(folder: Path) -> None:
    compiled, _ = numerics(folder)
    plain, _ = numerics(folder, kernels="reference")
    assert f"numba {version('numba')}, llvmlite {version('llvmlite')}" in compiled["versions"]
    assert "numba" not in plain["versions"]
    assert compiled["kernels"] == f"numba {load_backend('numba').numerics}"
    assert " strips of " in compiled["kernels"]
    assert plain["kernels"] == "reference"


def test_a_byte_in_the_middle_of_the_weights_is_another_model(folder: Path) -> None:
    _, plain = numerics(folder)
    path = next(folder.glob("*.safetensors"))
    data = bytearray(path.read_bytes())
    data[len(data) // 2] ^= 1
    path.write_bytes(data)
    before, changed = numerics(folder)
    assert before["weights"] == ""
    assert why_not_resume(plain, changed).startswith("weights: ")
