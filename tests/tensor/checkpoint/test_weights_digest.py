"""Tests the digest of all weight bytes: what it depends on, when it is known, and how a changed file changes it."""

from __future__ import annotations

import os
import resource
from pathlib import Path

import pytest

from headrace.machine.cache_folder import ENVIRONMENT
from headrace.registry.cache import NodeCache
from headrace.registry.names import Reference
from headrace.registry.remote import Registry
from headrace.tensor.checkpoint import weights_digest
from headrace.tensor.checkpoint.weights_digest import WeightsDigest
from headrace.tensor.host.unfinished import UNFINISHED, locked

pytestmark = pytest.mark.pure


@pytest.fixture
def files(tmp_path: Path) -> list[Path]:
    made = [tmp_path / "model" / name for name in ("config.json", "a.safetensors", "b.safetensors")]
    made[0].parent.mkdir()
    for number, path in enumerate(made):
        path.write_bytes(bytes([number]) * 100_000)
    return made


@pytest.fixture
def records(tmp_path: Path) -> Path:
    folder = tmp_path / "records"
    folder.mkdir()
    return folder


def flip(path: Path, at: int) -> None:
    """One byte in the middle, with the file's size, inode and times of change kept as far as they can be."""
    before = path.stat()
    with path.open("r+b") as stream:
        stream.seek(at)
        stream.write(b"\xff")
    os.utime(path, ns=(before.st_atime_ns, before.st_mtime_ns))


@pytest.mark.parametrize("at", [0, 50_000, 99_999])
@pytest.mark.parametrize("number", [0, 1, 2])
def test_every_byte_of_every_file_counts(files: list[Path], number: int, at: int) -> None:
    before = WeightsDigest(files, None).compute()
    assert before == WeightsDigest(list(reversed(files)), None).compute()
    flip(files[number], at)
    assert WeightsDigest(files, None).compute() != before != ""


def test_a_record_makes_it_known_at_once_and_only_for_the_files_it_was_made_of(files: list[Path], records: Path) -> None:
    first = WeightsDigest(files, records)
    assert first.known == ""
    assert first.compute() == first.known != ""
    assert WeightsDigest(files, records).known == first.known
    flip(files[1], 50_000)
    changed = WeightsDigest(files, records)
    assert changed.known == "", "size and time of change are the same: the inode's own time is not"
    assert changed.compute() != first.known
    assert WeightsDigest(files, records).known == changed.known
    assert len(list(records.iterdir())) == 1


@pytest.mark.parametrize("text", ["", "{", "[]", '{"digest": "ab"}', '{"digest": "ab", "stamps": []}'])
def test_a_damaged_record_is_no_record(files: list[Path], records: Path, text: str) -> None:
    WeightsDigest(files, records).compute()
    [record] = records.iterdir()
    record.write_text(text)
    assert WeightsDigest(files, records).known == ""


def test_a_record_that_does_not_fit_the_disk_is_not_there(files: list[Path], records: Path, caplog: pytest.LogCaptureFixture) -> None:
    """The system writes as many bytes as fit and refuses the rest only when it is asked to write them."""
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (100, before[1]))
    try:
        digest = WeightsDigest(files, records).compute()
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)
    assert digest == WeightsDigest(files, None).compute()
    assert "hash the weights again" in caplog.text
    assert not list(records.iterdir())


def test_files_that_change_after_they_were_read_have_no_digest(files: list[Path], records: Path) -> None:
    digest = WeightsDigest(files, records)
    flip(files[2], 7)
    assert digest.compute() == digest.known == ""
    assert not list(records.iterdir())
    files[2].unlink()
    assert digest.compute() == ""


def test_what_was_packed_from_other_files_counts_as_those(files: list[Path]) -> None:
    plain = WeightsDigest(files, None).compute()
    same, other, another = (WeightsDigest(files, None) for _ in range(3))
    same.packed_from(plain)
    other.packed_from("of other files")
    another.packed_from("of other files still")
    assert (same.known, other.known) == ("", "")
    assert same.compute() == plain
    assert len({plain, other.compute(), another.compute()}) == 3


def test_what_a_process_left_behind_that_ended_while_it_wrote_is_removed(
    files: list[Path], records: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def end(_new: Path, _record: Path) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(os, "replace", end)
    with pytest.raises(KeyboardInterrupt):
        WeightsDigest(files, records).compute()
    assert [path.suffix for path in records.iterdir()] == [UNFINISHED]
    monkeypatch.undo()
    with locked(records / f"other{UNFINISHED}") as other:  # another process writes packed weights at this moment
        assert other is not None
        WeightsDigest(files[:2], records).compute()
        assert sorted(path.suffix for path in records.iterdir()) == [UNFINISHED, ".weights"]
    WeightsDigest(files[1:], records).compute()
    assert [path.suffix for path in records.iterdir()] == [".weights"] * 2


def test_records_are_bounded_in_bytes(files: list[Path], records: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    WeightsDigest(files, records).compute()
    [first] = records.iterdir()
    monkeypatch.setattr(weights_digest, "MAX_RECORDS_BYTES", 2 * first.stat().st_size)
    os.utime(first, (1, 1))
    WeightsDigest(files[1:], records).compute()
    WeightsDigest(files[:2], records).compute()
    assert len(list(records.iterdir())) == 2
    assert not first.exists()
    monkeypatch.setattr(weights_digest, "MAX_RECORD_BYTES", 10)
    assert WeightsDigest(files[:1], records).compute() != ""
    assert len(list(records.iterdir())) == 2


def test_a_record_that_cannot_be_removed_is_no_reason_to_doubt_the_digest(
    files: list[Path], records: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(weights_digest, "MAX_RECORDS", 1)
    (records / "old.weights").mkdir()
    os.utime(records / "old.weights", (1, 1))
    assert WeightsDigest(files, records).compute() == WeightsDigest(files, None).compute()
    assert not caplog.records


def test_old_records_make_room(files: list[Path], records: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(weights_digest, "MAX_RECORDS", 2)
    for number in range(4):
        (records / f"{number}.weights").touch()
        os.utime(records / f"{number}.weights", (number, number))
    WeightsDigest(files, records).compute()
    assert len(list(records.iterdir())) == 2
    assert not (records / "2.weights").exists()


def test_what_a_pull_has_hashed_is_known_until_it_is_changed(files: list[Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The change keeps size and time of the file. A folder elsewhere is believed nothing."""
    monkeypatch.setenv(ENVIRONMENT, str(tmp_path / "cache"))
    files[0].write_text("{}")
    Registry(f"file://{tmp_path}/registry", may_make=True).push(files[0].parent, "llama", "1")
    folder = NodeCache().pull(Reference(f"file://{tmp_path}/registry", "llama", "1"))
    pulled = [folder / path.name for path in files]
    assert WeightsDigest(pulled, None).known == WeightsDigest(files, None).compute() != ""
    (files[0].parent.parent / ".seen").write_bytes((folder.parent / ".seen").read_bytes())
    assert WeightsDigest(files, None).known == ""
    tick = tmp_path / "tick"
    tick.touch()
    while tick.stat().st_ctime_ns <= (folder.parent / ".seen").stat().st_mtime_ns:  # the clock of files has steps of some milliseconds
        tick.touch()
    pulled[1].chmod(0o600)
    flip(pulled[1], 50)
    assert WeightsDigest(pulled, None).known == ""
    assert WeightsDigest(pulled, None).compute() != WeightsDigest(files, None).compute()
