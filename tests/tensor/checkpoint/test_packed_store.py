"""Packed weights on disk: the second start gives the same model without reading the weights, and nothing stale is ever used."""

from __future__ import annotations

import logging
import os
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch

from headrace.bundled import DEFAULT_MODEL, bundled_path
from headrace.core.errors import CheckpointError
from headrace.tensor import packed_store
from headrace.tensor.checkpoint import Checkpoint
from headrace.tensor.kernels import load_kernels
from headrace.tensor.models import LoadedModel, load_model


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    bundled = bundled_path(DEFAULT_MODEL)
    assert bundled is not None
    return Path(shutil.copytree(bundled, tmp_path / "model"))


@pytest.fixture
def kept(tmp_path: Path) -> Path:
    (tmp_path / "packed").mkdir()
    return tmp_path / "packed"


def loaded(folder: Path, packed_dir: Path | None, quantization: str = "int8") -> LoadedModel:
    return load_model(
        folder,
        kernels=load_kernels("numba"),
        dtype=torch.float32,
        device="cpu",
        load_format="auto",
        seed=0,
        max_model_len=64,
        quantization=quantization,
        packed_dir=packed_dir,
    )


def linears(model: LoadedModel) -> list[Any]:
    found: list[Any] = [model.model.head]
    for block in model.model.blocks:
        found += [*block.attention.linears, *block.mlp.linears]
    return found


def assert_equal(one: LoadedModel, other: LoadedModel) -> None:
    assert (one.model_digest, one.weight_bytes) == (other.model_digest, other.weight_bytes)
    for a, b in zip(linears(one), linears(other), strict=True):
        assert (a.out_features, a.in_features, a.group) == (b.out_features, b.in_features, b.group)
        assert all(torch.equal(getattr(a, name), getattr(b, name)) for name in ("words", "scales", "bias"))


@pytest.mark.parametrize("quantization", ["int8", "int4"])
def test_the_second_load_gives_the_same_and_reads_no_linear(
    folder: Path, kept: Path, quantization: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    plain = loaded(folder, None, quantization)
    first = loaded(folder, kept, quantization)
    assert len(list(kept.iterdir())) == 1
    read: list[str] = []
    original = Checkpoint.read

    def spy(self: Checkpoint, name: str, *rest: Any) -> torch.Tensor:
        read.append(name)
        return original(self, name, *rest)

    monkeypatch.setattr(Checkpoint, "read", spy)
    second = loaded(folder, kept, quantization)
    assert read
    assert not any("proj" in name for name in read)
    assert_equal(plain, first)
    assert_equal(plain, second)


def test_a_changed_checkpoint_and_another_precision_are_packed_anew(folder: Path, kept: Path) -> None:
    loaded(folder, kept)
    loaded(folder, kept, "int4")
    os.utime(folder / "model.safetensors", ns=(1, 1))
    loaded(folder, kept)
    assert len(list(kept.iterdir())) == 3
    loaded(folder, kept, "none")
    assert len(list(kept.iterdir())) == 3


@pytest.mark.parametrize("damage", ["cut", "empty", "noise", "other model"])
def test_a_damaged_file_is_made_again(folder: Path, kept: Path, damage: str, caplog: pytest.LogCaptureFixture) -> None:
    plain = loaded(folder, kept)
    [file] = kept.iterdir()
    whole = file.read_bytes()
    if damage == "other model":
        loaded(folder, kept, "int4")
        [other] = set(kept.iterdir()) - {file}
        other.replace(file)
    else:
        file.write_bytes({"cut": whole[: len(whole) // 2], "empty": b"", "noise": whole[:-4000] + os.urandom(10)}[damage])
    with caplog.at_level(logging.WARNING):
        again = loaded(folder, kept)
    assert_equal(plain, again)
    assert "made again" in caplog.text


def test_a_checkpoint_that_lacks_a_tensor_is_refused_all_the_same(folder: Path, kept: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A kept file says nothing about whether the checkpoint it came from is whole."""
    from safetensors.torch import load_file, save_file

    loaded(folder, kept)
    [file] = kept.iterdir()
    tensors = load_file(folder / "model.safetensors")
    del tensors["model.layers.1.mlp.down_proj.weight"]
    save_file(tensors, folder / "model.safetensors")
    monkeypatch.setattr("headrace.tensor.models.store_name", lambda *given, **named: file.name)
    with pytest.raises(CheckpointError, match="down_proj"):
        loaded(folder, kept)


def test_a_folder_that_cannot_be_written_costs_nothing_but_time(
    folder: Path, kept: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    plain = loaded(folder, None)
    monkeypatch.setattr(packed_store, "MAX_DISK_SHARE", 0.0)
    with caplog.at_level(logging.WARNING):
        assert_equal(plain, loaded(folder, kept))
    assert "free space" in caplog.text
    assert list(kept.iterdir()) == []


def test_what_was_not_used_for_long_makes_room(folder: Path, kept: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(packed_store, "MAX_FILES", 2)
    names: list[str] = []
    for number in range(3):
        os.utime(folder / "model.safetensors", ns=(number, number))
        loaded(folder, kept)
        [new] = {path.name for path in kept.iterdir()} - set(names)
        names.append(new)
        os.utime(kept / new, (1000 + number, 1000 + number))
    assert {path.name for path in kept.iterdir()} == set(names[1:])


def test_the_folder_is_private_and_may_be_missing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setenv("HEADRACE_CACHE_DIR", str(tmp_path / "cache"))
    found = packed_store.packed_directory()
    assert found is not None
    assert found.stat().st_mode & 0o077 == 0
    found.chmod(0o777)
    with caplog.at_level(logging.WARNING):
        assert packed_store.packed_directory() is None
    assert "not kept" in caplog.text
