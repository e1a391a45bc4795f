"""Tests files of packed weights: what is read ahead is used or dropped, and tables stay in the file."""

from __future__ import annotations

import gc
import os
import threading
from collections import deque
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

pytest.importorskip("numba")

from headrace.core.errors import CheckpointError
from headrace.tensor.checkpoint import files as checkpoint_files
from headrace.tensor.host import file_memory
from headrace.tensor.host.file_memory import FileReading
from headrace.tensor.kernels.cpu.stored_rows import read_rows
from headrace.tensor.layers.table import HeldTable
from headrace.tensor.packed.file import NOTE_SUFFIX, TABLE, PackedFile, PackedFolder
from headrace.tensor.packed.store import StoredTable, write_tensors

pytestmark = pytest.mark.pure

NAME = "0" * 32 + "-0.safetensors"
SHAPE = (700, 16)
OTHER = "1" * 32 + "-0.safetensors"
LINEARS = {"a/words": torch.arange(24, dtype=torch.int32).reshape(4, 6), "a/scales": torch.randn(3).bfloat16(), "b": torch.randn(5)}
TABLES = {TABLE + "rows": torch.randn(700, 16).bfloat16()}


def no_checkpoint() -> torch.Tensor:
    raise CheckpointError("f", "no checkpoint here")


def stored(file: PackedFile, shape: tuple[int, int] = SHAPE) -> StoredTable:
    return StoredTable(file, "rows", shape, read_rows, no_checkpoint)


def written(path: Path, *what: Mapping[str, Any]) -> None:
    with path.open("wb") as stream:
        deque(write_tensors(stream.fileno(), *what), maxlen=0)


@pytest.fixture
def folder(tmp_path: Path) -> PackedFolder:
    written(tmp_path / NAME, LINEARS, TABLES, {"made for": NAME})
    return PackedFolder(tmp_path, {"model": "m"})


def held(file: PackedFile) -> dict[str, torch.Tensor]:
    file.wait()
    found = {}
    for name, tensor in LINEARS.items():
        entry, memory, first = file.place(name)
        flat = torch.frombuffer(memory, dtype=torch.uint8, count=entry.end - entry.begin, offset=first)
        found[name] = flat.view(tensor.dtype).reshape(entry.shape)
    return found | {TABLE + "rows": stored(file).rows(torch.arange(700))}


def assert_as_written(found: dict[str, torch.Tensor]) -> None:
    assert found.keys() == {**LINEARS, **TABLES}.keys()
    for name, tensor in {**LINEARS, **TABLES}.items():
        assert found[name].dtype == tensor.dtype
        assert torch.equal(found[name], tensor)


def note(folder: PackedFolder) -> Path:
    [found] = folder.directory.glob("*" + NOTE_SUFFIX)
    return found


@pytest.mark.socket
def test_what_is_written_is_read_back_and_is_a_safetensors_file(folder: PackedFolder) -> None:
    assert_as_written(held(PackedFile(folder.directory / NAME, 1)))
    assert_as_written(load_file(folder.directory / NAME))


def test_every_element_lies_as_its_size_needs_and_tables_come_last(folder: PackedFolder) -> None:
    file = PackedFile(folder.directory / NAME, 0)
    file.wait()
    assert all(file.place(name)[2] % tensor.element_size() == 0 for name, tensor in LINEARS.items())
    assert file.tensors[TABLE + "rows"].begin == max(entry.begin for entry in file.tensors.values())


@pytest.mark.parametrize("ids", [[], [0], [699, 0, 3, 3, 698], list(range(700)) * 3])
def test_rows_of_a_stored_table_are_those_of_the_one_in_memory(folder: PackedFolder, ids: list[int]) -> None:
    table, wanted = stored(PackedFile(folder.directory / NAME, 0)), torch.tensor(ids, dtype=torch.int64)
    assert torch.equal(table.rows(wanted), HeldTable(TABLES[TABLE + "rows"]).rows(wanted))
    strided = torch.stack([wanted, wanted + 1], 1)[:, 0]
    assert torch.equal(table.rows(strided), table.rows(wanted))


def test_a_table_outlives_its_file(folder: PackedFolder) -> None:
    table = stored(PackedFile(folder.directory / NAME, 0))
    (folder.directory / NAME).unlink()
    gc.collect()
    assert torch.equal(table.rows(torch.tensor([5])), TABLES[TABLE + "rows"][5:6])


@pytest.mark.parametrize("bad", [-1, 700, 2**40])
def test_an_id_that_is_no_row_is_refused(folder: PackedFolder, bad: int) -> None:
    table = stored(PackedFile(folder.directory / NAME, 0))
    with pytest.raises(IndexError, match=r"outside 0\.\.699"):
        table.rows(torch.tensor([3, bad]))


def test_a_table_cut_short_is_an_error_and_not_a_wrong_row(folder: PackedFolder) -> None:
    table = stored(PackedFile(folder.directory / NAME, 0))
    with (folder.directory / NAME).open("r+b") as stream:
        stream.truncate((folder.directory / NAME).stat().st_size - 40)
    assert torch.equal(table.rows(torch.tensor([697])), TABLES[TABLE + "rows"][697:698])
    for row in (698, 699):
        with pytest.raises(CheckpointError, match="no checkpoint here"):
            table.rows(torch.tensor([0, row]))


@pytest.mark.parametrize("shape", [(699, 16), (16, 700), (700, 8)])
def test_a_table_of_another_shape_is_refused(folder: PackedFolder, shape: tuple[int, int]) -> None:
    with pytest.raises(ValueError, match="rows is BF16"):
        stored(PackedFile(folder.directory / NAME, 0), shape)


@pytest.mark.socket
def test_a_file_is_closed_with_the_last_object_that_uses_it(folder: PackedFolder) -> None:
    def num_open() -> int:
        return sum(str(folder.directory) in str(link.readlink()) for link in Path("/proc/self/fd").iterdir() if link.is_symlink())

    table = stored(PackedFile(folder.directory / NAME, 1))
    table._file.wait()
    gc.collect()
    assert num_open() == 1
    del table
    gc.collect()
    assert num_open() == 0


def test_a_linear_after_a_table_is_refused(tmp_path: Path) -> None:
    save_file({TABLE + "a": torch.zeros(4), "z": torch.zeros(4)}, tmp_path / NAME)
    file = PackedFile(tmp_path / NAME, 0)
    assert file.tensors["z"].begin > 0
    file.wait()
    with pytest.raises(ValueError, match="after a table"):
        file.place("z")


@pytest.mark.socket
def test_what_was_read_ahead_is_what_is_opened(folder: PackedFolder) -> None:
    folder.remember(NAME)
    again = PackedFolder(folder.directory, {"model": "m"})
    again.read_ahead(1 << 30)
    file = again._ahead
    assert file is not None
    assert again.open(NAME, 1) is file
    assert_as_written(held(file))
    assert again.num_bytes_ahead == 0


def test_a_configuration_knows_its_own_file_only(folder: PackedFolder) -> None:
    folder.remember(NAME)
    other = PackedFolder(folder.directory, {"model": "another"})
    other.read_ahead(1 << 30)
    assert other._ahead is None


@pytest.mark.socket
def test_another_file_than_was_read_ahead_is_read_and_the_first_one_dropped(folder: PackedFolder) -> None:
    written(folder.directory / OTHER, {"b": torch.zeros(5)}, {}, {})
    folder.remember(OTHER)
    folder.read_ahead(1 << 30)
    assert folder._ahead is not None
    assert folder._ahead.path.name == OTHER
    assert_as_written(held(folder.open(NAME, 1)))
    assert folder._ahead is None


@pytest.mark.socket
def test_nothing_is_read_ahead_that_is_larger_than_may_be(folder: PackedFolder) -> None:
    folder.remember(NAME)
    folder.read_ahead((folder.directory / NAME).stat().st_size - 1)
    assert folder._ahead is None
    assert_as_written(held(folder.open(NAME, 1)))


@pytest.mark.parametrize("text", ["../" + NAME, "", "x" * 10_000, "/etc/passwd", NAME + "\0", "9" * 32 + "-0.safetensors"])
def test_a_note_that_names_no_file_of_the_folder_is_no_matter(folder: PackedFolder, text: str) -> None:
    folder.remember(NAME)
    note(folder).write_text(text)
    folder.read_ahead(1 << 30)
    assert folder._ahead is None


def test_a_damaged_file_read_ahead_is_refused_when_it_is_opened(folder: PackedFolder) -> None:
    folder.remember(NAME)
    with (folder.directory / NAME).open("r+b") as stream:
        stream.truncate(200)
    folder.read_ahead(1 << 30)
    with pytest.raises(CheckpointError, match="damaged"):
        folder.open(NAME, 1)


def test_the_note_is_written_once_and_replaced_whole(folder: PackedFolder) -> None:
    folder.remember(NAME)
    before = note(folder).stat().st_ino
    folder.remember(NAME)
    assert note(folder).stat().st_ino == before
    folder.remember(OTHER)
    assert note(folder).read_text() == OTHER
    assert not list(folder.directory.glob("*.new"))


def test_more_tensors_than_can_be_read_back_are_not_written(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(checkpoint_files, "MAX_CONTAINERS", 50)
    with pytest.raises(CheckpointError, match="more than 50"):
        written(tmp_path / NAME, {str(number): torch.zeros(1) for number in range(30)}, {}, {})
    assert (tmp_path / NAME).stat().st_size == 0


# reading


@pytest.mark.socket
@pytest.mark.parametrize("num_threads", [0, 1, 3])
def test_many_chunks_arrive_whole_and_in_place(tmp_path: Path, num_threads: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(file_memory, "CHUNK_BYTES", 1000)
    data = os.urandom(50_001)
    (tmp_path / "f").write_bytes(data)
    target = bytearray(49_990)
    with (tmp_path / "f").open("rb") as stream:
        reading = FileReading(stream.fileno(), [(memoryview(target), 7)], num_threads)
        reading.wait()
    assert target == data[7 : 7 + 49_990]
    assert reading.num_read == 49_990


@pytest.mark.socket
def test_a_file_that_became_shorter_is_an_error(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(file_memory, "CHUNK_BYTES", 1000)
    (tmp_path / "f").write_bytes(b"x" * 5000)
    with (tmp_path / "f").open("rb") as stream, pytest.raises(OSError, match="shorter"):
        FileReading(stream.fileno(), [(memoryview(bytearray(9000)), 0)], 2).wait()


def test_where_no_thread_may_be_had_who_waits_reads_alone(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(self: threading.Thread) -> None:
        raise RuntimeError("can't start new thread")

    monkeypatch.setattr(threading.Thread, "start", refuse)
    (tmp_path / "f").write_bytes(b"x" * 5000)
    target = bytearray(5000)
    with (tmp_path / "f").open("rb") as stream:
        FileReading(stream.fileno(), [(memoryview(target), 0)], 2).wait()
    assert target == b"x" * 5000


@pytest.mark.socket
def test_after_a_stop_nothing_is_written_any_more(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(file_memory, "CHUNK_BYTES", 1 << 16)
    (tmp_path / "f").write_bytes(b"x" * (16 << 20))
    target = bytearray(16 << 20)
    with (tmp_path / "f").open("rb") as stream:
        reading = FileReading(stream.fileno(), [(memoryview(target), 0)], 2)
        reading.stop()
    target[:] = bytes(16 << 20)
    assert not any(thread.is_alive() for thread in reading._threads)
    assert target.count(0) == 16 << 20
