"""A folder's digests: the same content gives the same digests, in whatever process."""

from __future__ import annotations

from pathlib import Path

import text_kit

from headrace.core.digests import text_digests
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
