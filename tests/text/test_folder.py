"""A folder's digests: the same content gives the same digests, in whatever process."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest
import text_kit

from headrace.bundled import DEFAULT_MODEL, bundled_path
from headrace.core.digests import text_digests
from headrace.core.errors import CheckpointError
from headrace.text.folder import load_text


def test_digests_follow_the_content_of_the_files(tmp_path: Path) -> None:
    one = load_text(text_kit.save_byte_level(tmp_path / "one"))
    same = load_text(text_kit.save_byte_level(tmp_path / "two"))
    assert one.digests == same.digests
    assert set(one.digests) == {"tokenizer", "template"}
    other = text_kit.save_byte_level(tmp_path / "three", chat_template="{{ messages }}", bos=False)
    assert load_text(other).digests["template"] != one.digests["template"]
    assert load_text(other).digests["tokenizer"] != one.digests["tokenizer"]


def test_a_kind_without_files_has_no_digest() -> None:
    assert text_digests({}) == {"tokenizer": "", "template": ""}
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
