"""Tests a folder's digests: the same content gives the same digests, in whatever process."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest
import text_kit

from headrace.bundled import DEFAULT_MODEL, bundled_path
from headrace.core.errors import CheckpointError
from headrace.core.model_info import text_digests
from headrace.text.folder import load_text

pytestmark = pytest.mark.pure


def test_digests_follow_the_content_of_the_files(tmp_path: Path) -> None:
    one = load_text(text_kit.save_byte_level(tmp_path / "one"))
    same = load_text(text_kit.save_byte_level(tmp_path / "two"))
    assert one.digests == same.digests
    assert set(one.digests) == {"tokenizer", "template", "special tokens"}
    other = text_kit.save_byte_level(tmp_path / "three", chat_template="{{ messages }}", bos=False)
    assert load_text(other).digests["template"] != one.digests["template"]
    assert load_text(other).digests["tokenizer"] != one.digests["tokenizer"]


def test_a_kind_without_files_has_no_digest() -> None:
    assert text_digests({}) == {"tokenizer": "", "template": "", "special tokens": ""}
    assert text_digests({"tokenizer.json": b"x"})["tokenizer"] != ""


def test_content_cannot_move_between_files() -> None:
    assert text_digests({"chat_template.jinja": b"ab"}) != text_digests({"tokenizer_config.json": b"ab"})


def copy_bundled(folder: Path) -> None:
    bundled = bundled_path(DEFAULT_MODEL)
    assert bundled is not None
    shutil.copytree(bundled, folder)


@pytest.mark.parametrize(
    "file", ["tokenizer.json", "tokenizer_config.json", "chat_template.jinja", "additional_chat_templates/tool_use.jinja"]
)
def test_links_that_lead_out_of_the_folder_are_refused(tmp_path: Path, file: str) -> None:
    """What a template says reaches clients: a downloaded folder must not be able to name any file of this machine."""
    folder, outside = tmp_path / "model", tmp_path / "secret"
    copy_bundled(folder)
    (folder / "additional_chat_templates").mkdir()
    outside.write_text((folder / file).read_text() if (folder / file).exists() else "secret")
    (folder / file).unlink(missing_ok=True)
    (folder / file).symlink_to(outside)
    with pytest.raises(CheckpointError, match="leads out of the folder"):
        load_text(folder)


def test_links_into_a_hub_caches_blobs_are_followed(tmp_path: Path) -> None:
    snapshot, blobs = tmp_path / "models--a--b" / "snapshots" / "rev", tmp_path / "models--a--b" / "blobs"
    copy_bundled(snapshot)
    blobs.mkdir()
    for number, path in enumerate(sorted(snapshot.iterdir())):
        path.rename(blobs / str(number))
        path.symlink_to(Path("..", "..", "blobs", str(number)))
    assert load_text(snapshot).template.exists


def limited(folder: Path, vocab_size: int) -> Path:
    """A folder of text files whose config.json gives the model so many rows."""
    text_kit.save_byte_level(folder)
    text_kit.write_json(folder / "config.json", {"vocab_size": vocab_size})
    return folder


def test_a_tokenizer_with_more_ids_than_the_model_has_rows_is_refused(tmp_path: Path) -> None:
    """It loaded, and requests failed that happened to hold one of those ids."""
    size = load_text(text_kit.save_byte_level(tmp_path / "free")).tokenizer.vocab_size
    assert load_text(limited(tmp_path / "exact", size)).tokenizer.vocab_size == size
    assert load_text(limited(tmp_path / "padded", size + 64)).tokenizer.vocab_size == size
    with pytest.raises(CheckpointError) as refused:
        load_text(limited(tmp_path / "short", size - 1))
    assert f'token "</think>" has id {size - 1}, and config.json\'s vocab_size = {size - 1} ends at {size - 2}' in str(refused.value)
    assert "fetch both from one place" in str(refused.value)
    with pytest.raises(CheckpointError, match=r"token .* has id 300,"):
        load_text(limited(tmp_path / "other", 300))


def test_a_control_token_beyond_the_rows_is_no_reason_to_refuse(tmp_path: Path) -> None:
    """Fine-tunes add a padding token and no row for it; nothing gives it to the model."""
    folder = text_kit.save_byte_level(tmp_path)
    document = json.loads((folder / "tokenizer.json").read_text())
    size = load_text(folder).tokenizer.vocab_size
    added = {"id": size, "content": "<pad>", "single_word": False, "lstrip": False, "rstrip": False, "normalized": False, "special": True}
    document["added_tokens"].append(added)
    text_kit.write_json(folder / "tokenizer.json", document)
    text_kit.write_json(folder / "config.json", {"vocab_size": size})
    assert load_text(folder).tokenizer.vocab_size == size + 1
    text_kit.write_json(folder / "tokenizer_config.json", {"bos_token": "<pad>"})  # what opens every prompt does need its row
    with pytest.raises(CheckpointError, match=r"token .<pad>. has id"):
        load_text(folder)
