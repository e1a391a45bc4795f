"""Tests that a text never has fewer tokens than its bytes say, and that tokenizers that drop text have no bound."""

from __future__ import annotations

import json
import sys
import unicodedata
from pathlib import Path
from typing import Any

import pytest
import text_kit
from hypothesis import given, settings
from hypothesis import strategies as st

from headrace.bundled import FOLDER
from headrace.text.token_bytes import NORMAL_FORM_SHRINKS, TokenBound
from headrace.text.tokenizer import Tokenizer

pytestmark = pytest.mark.pure

LONGEST = st.sampled_from([" " * 40, "\u2581" * 9, "<|im_end|>", "the quick brown", "0" * 30, "\u00e9" * 7, "e\u0301\u0323", "\U0001f389"])
TEXTS = st.lists(st.one_of(LONGEST, st.text(max_size=20)), max_size=8).map("".join)


@pytest.fixture(scope="module")
def tokenizers(tmp_path_factory: pytest.TempPathFactory) -> list[Tokenizer]:
    folder = tmp_path_factory.mktemp("bounds")
    made = [text_kit.save_byte_level(folder / "bytes"), text_kit.save_metaspace(folder / "metaspace"), FOLDER / "headrace-tiny"]
    return [Tokenizer.load(path) for path in made]


@settings(max_examples=300, deadline=None)
@given(text=TEXTS, is_control=st.booleans())
def test_no_text_has_fewer_tokens_than_its_bound_says(tokenizers: list[Tokenizer], text: str, is_control: bool) -> None:
    for tokenizer in tokenizers:
        assert tokenizer.bound is not None
        ids = tokenizer.encode(text, add_special_tokens=False, allow_control_tokens=is_control)
        assert tokenizer.bound.least_tokens(text) <= len(ids)


def test_the_bound_is_close_for_text_of_the_longest_token(tokenizers: list[Tokenizer]) -> None:
    for tokenizer in tokenizers:
        longest = max((tokenizer.token_bytes(i) for i in range(tokenizer.vocab_size)), key=len).decode("utf-8", "replace")
        text = longest * 100
        assert tokenizer.bound is not None
        assert len(tokenizer.encode(text, add_special_tokens=False, allow_control_tokens=True)) <= 4 * tokenizer.bound.least_tokens(text)


def changed(folder: Path, **sections: Any) -> TokenBound | None:
    """The bound of a byte-level tokenizer with other sections."""
    path = text_kit.save_byte_level(folder) / "tokenizer.json"
    document = json.loads(path.read_text(encoding="utf-8"))
    for name, value in sections.items():
        document[name] = value(document[name])
    path.write_text(json.dumps(document), encoding="utf-8")
    return Tokenizer.load(folder).bound


@pytest.mark.parametrize(
    "normalizer",
    [
        {"type": "Strip", "strip_left": True, "strip_right": True},
        {"type": "Replace", "pattern": {"Regex": "\\s+"}, "content": " "},
        {"type": "Replace", "pattern": {"String": "x"}, "content": ""},
        {"type": "Sequence", "normalizers": [{"type": "NFC"}, {"type": "StripAccents"}]},
    ],
)
def test_a_normalizer_that_takes_text_away_leaves_no_bound(tmp_path: Path, normalizer: object) -> None:
    assert changed(tmp_path, normalizer=lambda _: normalizer) is None


def test_a_pre_tokenizer_that_takes_text_away_leaves_no_bound(tmp_path: Path) -> None:
    removing = {"type": "Split", "pattern": {"Regex": "\\s+"}, "behavior": "Removed", "invert": False}
    assert changed(tmp_path / "a", pre_tokenizer=lambda own: {"type": "Sequence", "pretokenizers": [removing, own]}) is None
    isolating = {**removing, "behavior": "Isolated"}
    assert changed(tmp_path / "b", pre_tokenizer=lambda own: {"type": "Sequence", "pretokenizers": [isolating, own]}) is not None


def test_tokens_that_swallow_white_space_do_not_count_it(tmp_path: Path) -> None:
    bound = changed(tmp_path, added_tokens=lambda tokens: [{**token, "rstrip": True} for token in tokens])
    assert bound is not None
    assert not bound.counts_spaces
    tokenizer = Tokenizer.load(tmp_path)
    text = "<|im_end|>" + " \n\t\u3000" * 10_000
    assert len(tokenizer.encode(text, add_special_tokens=False, allow_control_tokens=True)) == bound.least_tokens(text) == 1


def test_a_normal_form_is_never_an_eighth_of_the_text() -> None:
    """A composed character may come from the characters of its full decomposition, each of these from any that is compatible with it."""
    changed = [char for code in range(sys.maxunicode + 1) if unicodedata.decomposition(char := chr(code))]
    widest: dict[str, int] = {}
    for char in changed:
        if len(simple := unicodedata.normalize("NFKD", char)) == 1:
            widest[simple] = max(widest.get(simple, len(simple.encode())), len(char.encode()))
    composed = [*changed, *widest, *map(chr, range(0xAC00, 0xD7A4))]  # the last are Hangul's syllables, whose decomposition is a rule
    worst = max(
        sum(widest.get(part, len(part.encode())) for part in unicodedata.normalize("NFD", char)) / len(char.encode()) for char in composed
    )
    assert 4 <= worst < NORMAL_FORM_SHRINKS
