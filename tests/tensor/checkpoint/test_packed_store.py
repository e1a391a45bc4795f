"""Tests packed weights on disk: the second start gives the same model without reading the weights, and nothing stale is ever used."""

from __future__ import annotations

import gc
import logging
import os
import shutil
import weakref
from collections import deque
from dataclasses import replace
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
import torch
from cpu_families import AVX2

from headrace.bundled import DEFAULT_MODEL, bundled_path
from headrace.core.errors import CheckpointError
from headrace.core.parallelism import ALONE, Parallelism, Place
from headrace.machine import cache_folder
from headrace.tensor.backends import load_backend
from headrace.tensor.checkpoint import weights_digest
from headrace.tensor.checkpoint.folder import Checkpoint
from headrace.tensor.device import CPU
from headrace.tensor.host.unfinished import UNFINISHED, locked
from headrace.tensor.kernels.cpu.jit import launch
from headrace.tensor.kernels.cpu.linear import StripLinear
from headrace.tensor.kernels.rounding import Precision
from headrace.tensor.models import LoadedModel, load_model
from headrace.tensor.packed import store as packed_store
from headrace.tensor.packed.file import SUFFIX, PackedFolder
from headrace.tensor.packed.store import Pieces
from headrace.tensor.peers import NoPeers

pytestmark = pytest.mark.socket


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    bundled = bundled_path(DEFAULT_MODEL)
    assert bundled is not None
    return Path(shutil.copytree(bundled, tmp_path / "model"))


@pytest.fixture
def kept(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setattr(packed_store, "MIN_BYTES", 0)
    (tmp_path / "packed").mkdir()
    return tmp_path / "packed"


def files(kept: Path) -> list[Path]:
    return list(kept.glob("*" + SUFFIX))


def loaded_only(folder: Path, packed: Path | PackedFolder | None, quantization: str = "int8", place: Place = ALONE) -> LoadedModel:
    """The model, with nothing written to disk yet."""
    return load_model(
        folder,
        backend=load_backend("numba", features=AVX2),
        dtype=torch.float32,
        device=CPU,
        load_format="auto",
        seed=0,
        max_model_len=64,
        quantization=quantization,
        packed=PackedFolder(packed, {}) if isinstance(packed, Path) else packed,
        place=place,
        peers=NoPeers(),
    )


def loaded(folder: Path, packed: Path | PackedFolder | None, quantization: str = "int8", place: Place = ALONE) -> LoadedModel:
    """The model, once everything that a start keeps is on disk."""
    found = loaded_only(folder, packed, quantization, place)
    if found.store is not None:
        deque(found.store.save() or (), maxlen=0)
    return found


def linears(model: LoadedModel) -> list[Any]:
    found: list[Any] = [model.model.head]
    for block in model.model.blocks:
        found += [*block.attention.linears, *block.mlp.linears]
    return found


def assert_equal(one: LoadedModel, other: LoadedModel) -> None:
    assert (one.model_digest, one.weight_bytes) == (other.model_digest, other.weight_bytes)
    for a, b in zip(linears(one), linears(other), strict=True):
        assert (type(a), a.out_features, a.in_features) == (type(b), b.out_features, b.in_features)
        if isinstance(a, StripLinear):
            assert a.block == b.block
        names = ("strips", "bias") if isinstance(a, StripLinear) else ("words", "scales", "bias", "group")
        assert all(torch.equal(torch.as_tensor(getattr(a, name)), torch.as_tensor(getattr(b, name))) for name in names)
    assert torch.equal(one.model.embedding.whole(), other.model.embedding.whole())


@pytest.mark.parametrize("quantization", ["int8", "int4", "none"])
def test_the_second_load_gives_the_same_and_reads_no_linear(
    folder: Path, kept: Path, quantization: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    plain = loaded(folder, None, quantization)
    first = loaded(folder, kept, quantization)
    assert len(files(kept)) == 1
    read: list[str] = []
    original = Checkpoint.read

    def spy(self: Checkpoint, name: str, *rest: Any) -> torch.Tensor:
        read.append(name)
        return original(self, name, *rest)

    monkeypatch.setattr(Checkpoint, "read", spy)
    second = loaded(folder, kept, quantization)
    assert read
    assert not any("proj" in name or "embed" in name for name in read)
    assert_equal(plain, first)
    assert_equal(plain, second)


def test_a_changed_checkpoint_and_another_precision_are_packed_anew(folder: Path, kept: Path) -> None:
    loaded(folder, kept)
    loaded(folder, kept, "int4")
    os.utime(folder / "model.safetensors", ns=(1, 1))
    loaded(folder, kept)
    assert len(files(kept)) == 3
    loaded(folder, kept, "none")
    assert len(files(kept)) == 4


@pytest.mark.parametrize("damage", ["cut", "empty", "noise", "other model"])
def test_a_damaged_file_is_made_again(folder: Path, kept: Path, damage: str, caplog: pytest.LogCaptureFixture) -> None:
    plain = loaded(folder, kept)
    [file] = files(kept)
    whole = file.read_bytes()
    if damage == "other model":
        loaded(folder, kept, "int4")
        [other] = set(files(kept)) - {file}
        other.replace(file)
    else:
        file.write_bytes({"cut": whole[: len(whole) // 2], "empty": b"", "noise": whole[:-4000] + os.urandom(10)}[damage])
    with caplog.at_level(logging.WARNING):
        again = loaded(folder, kept)
    assert_equal(plain, again)
    assert "packed again" in caplog.text


def test_a_checkpoint_that_lacks_a_tensor_is_refused_all_the_same(folder: Path, kept: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A kept file says nothing about whether the checkpoint it came from is whole."""
    from safetensors.torch import load_file, save_file

    loaded(folder, kept)
    [file] = files(kept)
    tensors = load_file(folder / "model.safetensors")
    del tensors["model.layers.1.mlp.down_proj.weight"]
    save_file(tensors, folder / "model.safetensors")
    monkeypatch.setattr("headrace.tensor.models.store_name", lambda *given, **named: file.name)
    with pytest.raises(CheckpointError, match="down_proj"):
        loaded(folder, kept)


def test_embeddings_that_cannot_be_read_from_the_packed_file_any_more_come_from_the_checkpoint(
    folder: Path, kept: Path, caplog: pytest.LogCaptureFixture
) -> None:
    plain = loaded(folder, kept).model.embedding
    stored, ids = loaded(folder, kept).model.embedding, torch.tensor([3, 0, 3])
    assert (plain.resident_bytes > 0, stored.resident_bytes) == (True, 0)
    [file] = files(kept)
    with file.open("r+b") as stream:
        stream.truncate(file.stat().st_size // 2)
    for _ in range(2):
        assert torch.equal(stored.rows(ids), plain.rows(ids))
    assert stored.resident_bytes == plain.resident_bytes
    assert ["cannot be read" in record.message for record in caplog.records if record.levelno == logging.ERROR] == [True]


def test_embeddings_that_neither_file_gives_fail_the_step_alone(folder: Path, kept: Path) -> None:
    loaded(folder, kept)
    stored, ids = loaded(folder, kept).model.embedding, torch.tensor([3])
    for path in (*files(kept), folder / "model.safetensors"):
        with path.open("r+b") as stream:
            stream.truncate(100)
    with pytest.raises(CheckpointError):
        stored.rows(ids)


def test_weights_of_a_start_that_failed_are_released(folder: Path, kept: Path) -> None:
    """Until `save`, nothing but the loaded model holds what was packed."""
    found = loaded_only(folder, kept)
    held = weakref.ref(linears(found)[0])
    del found
    gc.collect()
    assert held() is None
    assert files(kept) == []


def test_a_folder_that_cannot_be_written_costs_nothing_but_time(
    folder: Path, kept: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    plain = loaded(folder, None)
    monkeypatch.setattr(packed_store, "MAX_DISK_SHARE", 0.0)
    with caplog.at_level(logging.WARNING):
        assert_equal(plain, loaded(folder, kept))
    assert "free space" in caplog.text
    assert [path for path in kept.iterdir() if path.suffix != ".weights"] == []


def test_what_was_not_used_for_long_makes_room(folder: Path, kept: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(packed_store, "MAX_MODELS", 2)
    names: list[str] = []
    for number in range(3):
        os.utime(folder / "model.safetensors", ns=(number, number))
        loaded(folder, kept)
        [new] = {path.name for path in files(kept)} - set(names)
        names.append(new)
        os.utime(kept / new, (1000 + number, 1000 + number))
    assert {path.name for path in files(kept)} == set(names[1:])


def test_each_rank_keeps_its_part(folder: Path, kept: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """They count as one model, also when a model of one rank is kept beside them."""
    monkeypatch.setattr(packed_store, "MAX_MODELS", 2)
    places = [Parallelism(2, 2).place(rank) for rank in range(4)]
    for place in places:
        loaded(folder, kept, place=place)
    loaded(folder, kept)
    assert len(files(kept)) == 5
    for place in places:
        plain, again = (loaded(folder, where, place=place).model for where in (None, kept))
        assert again.resident_bytes == plain.resident_bytes - (plain.embedding.resident_bytes if place.is_first else 0)
        for one, other in zip(plain.blocks, again.blocks, strict=True):
            assert torch.equal(one.mlp.linears[1].words, other.mlp.linears[1].words)  # type: ignore[attr-defined]
        if place.is_last:
            assert torch.equal(plain.head.words, again.head.words)  # type: ignore[attr-defined]
        else:
            assert torch.equal(plain.embedding.whole(), again.embedding.whole())


def test_the_folder_is_private_and_may_be_missing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setenv("HEADRACE_CACHE_DIR", str(tmp_path / "cache"))
    found = cache_folder.packed_directory()
    assert found is not None
    assert found.stat().st_mode & 0o077 == 0
    found.chmod(0o777)
    with caplog.at_level(logging.WARNING):
        assert cache_folder.packed_directory() is None
    assert "not kept" in caplog.text
    found.chmod(0o700)
    monkeypatch.setenv("HEADRACE_KEEP_PACKED", "0")
    assert cache_folder.packed_directory() is None


def test_a_linear_packed_in_a_way_that_is_not_kept_is_made_at_every_start(
    folder: Path, kept: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    form, width = load_backend("numba").packed_format, loaded(folder, None).vocab_size
    assert form is not None
    packed = form.packed
    monkeypatch.setattr(type(form), "packed", lambda self, linear: None if linear.out_features == width else packed(linear))
    first = loaded(folder, kept)
    [file] = files(kept)
    before = file.read_bytes()
    with caplog.at_level(logging.WARNING):
        assert_equal(first, loaded(folder, kept))
    assert not [record for record in caplog.records if record.levelno >= logging.WARNING]
    assert file.read_bytes() == before


def test_weights_of_another_number_of_threads_are_other_weights(folder: Path, kept: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Strips lie in blocks, and how many there are follows from the threads; integers do not."""
    for quantization, expected in (("none", 2), ("int8", 3)):
        for limit in (1, 2):
            monkeypatch.setattr(launch._THREADS, "limit", limit)
            loaded(folder, kept, quantization)
        assert len(files(kept)) == expected


def test_small_weights_are_not_kept(folder: Path, kept: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(packed_store, "MIN_BYTES", 1 << 40)
    loaded(folder, kept)
    assert [path for path in kept.iterdir() if path.suffix != ".weights"] == []


def test_what_killed_starts_and_removed_files_left_behind_is_cleared_away(folder: Path, kept: Path) -> None:
    left, note = kept / ("a" + UNFINISHED), kept / ("0" * 32 + ".last")
    for path in (left, note):
        path.write_text("gone")
    with locked(kept / ("b" + UNFINISHED)) as other:
        assert other is not None
        loaded(folder, kept)
        assert (kept / ("b" + UNFINISHED)).exists()
    assert not left.exists()
    assert not note.exists()
    assert len(list(kept.glob("*.last"))) == 1


def test_what_another_process_is_writing_is_left_to_it(folder: Path, kept: Path) -> None:
    loaded(folder, kept)
    [file] = files(kept)
    file.unlink()
    with locked(file.with_suffix(UNFINISHED)) as other:
        assert other is not None
        loaded(folder, kept)
        assert files(kept) == []
    loaded(folder, kept)
    assert files(kept) == [file]
    assert not list(kept.glob("*" + UNFINISHED))


def test_a_process_that_is_ended_while_it_writes_is_in_nobodys_way(folder: Path, kept: Path) -> None:
    loaded(folder, kept)
    [file] = files(kept)
    whole = file.read_bytes()
    file.unlink()
    file.with_suffix(UNFINISHED).write_bytes(b"x" * 10_000_000)  # what it leaves: bytes, and nobody's lock
    loaded(folder, kept)
    assert file.read_bytes() == whole
    assert not list(kept.glob("*" + UNFINISHED))


def unwritten(folder: Path, kept: Path) -> Pieces:
    """What a first start has to write."""
    store = loaded_only(folder, kept).store
    assert store is not None
    pieces = store.save()
    assert pieces is not None
    return pieces


def test_a_file_written_in_pieces_is_the_file_written_at_once_and_appears_when_it_is_whole(
    folder: Path, kept: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    loaded(folder, kept)
    [file] = files(kept)
    whole = file.read_bytes()
    for path in kept.iterdir():
        path.unlink()
    monkeypatch.setattr(packed_store, "PIECE_BYTES", 10_000)
    monkeypatch.setattr(weights_digest, "PIECE_BYTES", 10_000)
    sizes = []
    for _ in unwritten(folder, kept):
        assert files(kept) == []
        sizes.append(sum(path.stat().st_size for path in kept.glob("*" + UNFINISHED)))
    header_bytes = 8 + int.from_bytes(whole[:8], "little")
    assert max(after - before for before, after in pairwise(sizes)) < header_bytes + 2 * 10_000
    assert len(sizes) > len(whole) // 20_000, "and the checkpoint is hashed in pieces before"
    assert file.read_bytes() == whole
    assert_equal(loaded(folder, None), loaded(folder, kept))


def test_a_writing_that_is_given_up_leaves_nothing_and_the_next_start_writes(
    folder: Path, kept: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(packed_store, "PIECE_BYTES", 10_000)
    loaded(folder, kept)
    [file] = files(kept)
    whole = file.read_bytes()
    file.unlink()
    num_pieces = len(list(unwritten(folder, kept)))
    file.unlink()
    for num_done in (0, 1, num_pieces // 2, num_pieces - 1):
        pieces = unwritten(folder, kept)
        for _ in range(num_done):
            next(pieces)
        with caplog.at_level(logging.INFO):
            pieces.close()
        assert files(kept) == []
        assert not list(kept.glob("*" + UNFINISHED))
    assert "the next start packs them again" in caplog.text
    loaded(folder, kept)
    assert file.read_bytes() == whole


def test_a_file_that_another_process_wrote_meanwhile_is_left_alone(folder: Path, kept: Path) -> None:
    """Several replicas start at once, and find idle time one after another."""
    first, second, third = (unwritten(folder, kept) for _ in range(3))
    next(first)
    assert list(second) == [], "while the first is writing"
    deque(first, maxlen=0)
    [file] = files(kept)
    before = file.stat()
    assert list(third) == []
    assert (file.stat().st_ino, file.stat().st_mtime_ns) == (before.st_ino, before.st_mtime_ns)
    assert not list(kept.glob("*" + UNFINISHED))


def test_weights_that_cannot_be_read_back_are_not_kept(
    folder: Path, kept: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(packed_store, "MAX_JSON_BYTES", 1000)
    with caplog.at_level(logging.WARNING):
        loaded(folder, kept)
    assert "not kept" in caplog.text
    assert [path for path in kept.iterdir() if path.suffix != ".weights"] == []


def test_the_layout_says_all_that_strips_depend_on(monkeypatch: pytest.MonkeyPatch) -> None:
    form, invariant = (load_backend("numba", deterministic=promised).packed_format for promised in (False, True))
    assert form is not None
    assert invariant is not None
    for precision in Precision:
        seen = {form.packed_layout(precision)}
        with monkeypatch.context() as patch:
            patch.setattr("headrace.tensor.kernels.cpu.backend.DEPTH", 128)
            seen.add(form.packed_layout(precision))
        with monkeypatch.context() as patch:
            patch.setattr("headrace.tensor.kernels.cpu.backend.linear_path", lambda features, dtype: "another")
            seen.add(form.packed_layout(precision))
            assert "another" not in invariant.packed_layout(precision)
        assert len(seen) == 3


def test_the_next_start_reads_ahead_what_this_one_used(folder: Path, kept: Path) -> None:
    plain = loaded(folder, PackedFolder(kept, {"a": 1}), "none")
    again = PackedFolder(kept, {"a": 1})
    again.read_ahead(1 << 30)
    ahead = again._ahead
    assert ahead is not None
    second = loaded(folder, again, "none")
    assert_equal(plain, second)
    [file] = files(kept)
    assert ahead.path == file


@pytest.mark.parametrize(
    "change",
    [
        {"out_features": 65},
        {"in_features": 31},
        {"in_features": 30},
        {"block": 0},
        {"block": 1000},
        {"tensors": {"strips": torch.zeros(64 * 32 // 2, dtype=torch.int32), "bias": torch.zeros(63)}},
        {"tensors": {"strips": torch.zeros(64 * 32, dtype=torch.int8), "bias": torch.zeros(64)}},
        {"tensors": {"strips": torch.zeros(64 * 32 - 1), "bias": torch.zeros(64)}},
    ],
)
def test_strips_that_cannot_be_the_linear_they_are_said_to_be_are_refused(change: dict[str, Any]) -> None:
    packed = StripLinear.pack(torch.randn(64, 32), torch.randn(64)).packed()
    x = torch.randn(3, 32)
    assert torch.equal(StripLinear.of(packed)(x), StripLinear.of(replace(packed))(x))
    with pytest.raises(ValueError, match="do not fit"):
        StripLinear.of(replace(packed, **change))
