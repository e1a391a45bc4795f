"""Tests turning text into ids and back, and what user text may and may not become."""

from __future__ import annotations

import threading
import time
from functools import partial
from pathlib import Path

import pytest
import text_kit
import tokenizers
from counted_lines import growth
from figures import Figure
from hypothesis import given, settings
from hypothesis import strategies as st

from headrace.core.errors import CheckpointError, InvalidRequest
from headrace.text.tokenizer import Tokenizer

pytestmark = pytest.mark.pure

TEXTS = ["Hello world", "", " leading", "a\x00b", "caf\u00e9 \u65e5\u672c\u8a9e \U0001f389", "line\n\nline", "  two  "]


def oracle(tokenizer: Tokenizer) -> tokenizers.Tokenizer:
    return tokenizer._inner


@pytest.mark.parametrize("text", TEXTS)
@pytest.mark.parametrize("add_special", [True, False])
def test_harmless_text_encodes_as_the_library_does(tokenizer: Tokenizer, text: str, add_special: bool) -> None:
    expected = oracle(tokenizer).encode(text, add_special_tokens=add_special).ids
    assert tokenizer.encode(text, add_special_tokens=add_special) == expected


@given(text=st.text(max_size=60))
@settings(max_examples=150, deadline=None)
def test_text_survives_the_round_trip(byte_level: Tokenizer, metaspace: Tokenizer, text: str) -> None:
    assert byte_level.decode(byte_level.encode(text, add_special_tokens=True)) == text
    # To a metaspace model U+2581 is a space.
    assert metaspace.decode(metaspace.encode(text, add_special_tokens=True)) == text.replace("\u2581", " ")


@given(ids=st.lists(st.integers(0, 344), max_size=30))
@settings(max_examples=200, deadline=None)
def test_any_byte_level_ids_decode_as_the_library_does(byte_level: Tokenizer, ids: list[int]) -> None:
    for skip in (True, False):
        assert byte_level.decode(ids, skip_special_tokens=skip) == oracle(byte_level).decode(ids, skip_special_tokens=skip)


@given(text=st.text(max_size=40))
@settings(max_examples=100, deadline=None)
def test_metaspace_ids_of_a_text_decode_as_the_library_does(metaspace: Tokenizer, text: str) -> None:
    ids = oracle(metaspace).encode(text).ids
    assert metaspace.decode(ids) == oracle(metaspace).decode(ids)


def test_beginning_of_text_is_added_once_and_only_when_asked(tokenizer: Tokenizer) -> None:
    bos = tokenizer.bos_token_id
    assert bos is not None
    for text in ("Hello", "", "a <|im_end|> b", "a </s> b"):
        ids = tokenizer.encode(text, add_special_tokens=True)
        assert ids[:1] == [bos]
        assert bos not in ids[1:]
        assert ids[1:] == tokenizer.encode(text, add_special_tokens=False)


@pytest.mark.parametrize("pattern", ["{}", "before {} after", "{}{}", "x{}", "{}\nx", "  {}  "])
def test_control_tokens_in_user_text_become_ordinary_tokens(tokenizer: Tokenizer, pattern: str) -> None:
    for control in tokenizer.control_tokens:
        text = pattern.replace("{}", control)
        ids = tokenizer.encode(text, add_special_tokens=False)
        assert not any(i in tokenizer.special_ids for i in ids)
        assert tokenizer.decode(ids, skip_special_tokens=True) == text


def test_control_tokens_are_read_when_the_caller_says_so(byte_level: Tokenizer) -> None:
    ids = byte_level.encode("<|im_start|>user", add_special_tokens=False, allow_control_tokens=True)
    assert ids[0] == byte_level.token_to_id("<|im_start|>")


def test_ordinary_added_tokens_stay_what_they_are_in_user_text(byte_level: Tokenizer) -> None:
    assert byte_level.encode("<think>", add_special_tokens=False) == [byte_level.token_to_id("<think>")]


def test_two_control_tokens_nested_in_each_other_are_both_taken_apart(byte_level: Tokenizer) -> None:
    for text in ("<|im_<|im_end|>end|>", "<|im_end<|im_end|>|>", "<<|im_end|>|im_end|>"):
        ids = byte_level.encode(text, add_special_tokens=False)
        assert not any(i in byte_level.special_ids for i in ids)
        assert byte_level.decode(ids) == text


def _changed(folder: Path, source: Path, **changes: object) -> Path:
    """A copy of a folder with entries of tokenizer.json replaced."""
    import json

    document = json.loads((source / "tokenizer.json").read_text())
    folder.mkdir()
    text_kit.write_json(folder / "tokenizer.json", document | changes)
    (folder / "tokenizer_config.json").write_text((source / "tokenizer_config.json").read_text())
    return folder


def test_a_normalizer_cannot_make_a_control_token_out_of_other_letters(byte_level_folder: Path, tmp_path: Path) -> None:
    import json

    added = json.loads((byte_level_folder / "tokenizer.json").read_text())["added_tokens"]
    folder = _changed(
        tmp_path / "m", byte_level_folder, normalizer={"type": "NFKC"}, added_tokens=[{**token, "normalized": True} for token in added]
    )
    tokenizer = Tokenizer.load(folder)
    full_width = "\uff1c|im_end|\uff1e"
    assert tokenizer.token_to_id("<|im_end|>") in tokenizer.encode(full_width, add_special_tokens=False, allow_control_tokens=True)
    assert tokenizer.hides_control_token(full_width)
    ids = tokenizer.encode(full_width, add_special_tokens=True)
    assert tokenizer.token_to_id("<|im_end|>") not in ids
    assert tokenizer.decode(ids) == "<|im_end|>"


def test_a_control_token_the_model_itself_spells_is_taken_apart_letter_by_letter(byte_level_folder: Path, tmp_path: Path) -> None:
    import json

    document = json.loads((byte_level_folder / "tokenizer.json").read_text())
    model = document["model"]
    top = max(model["vocab"].values())
    end = next(token for token in document["added_tokens"] if token["content"] == "<|im_end|>")
    # The control token is in the model's vocabulary and whole words are looked up first, as in Llama 3's tokenizer.
    model["vocab"]["<|im_end|>"] = end["id"]
    folder = _changed(tmp_path / "m", byte_level_folder, model={**model, "ignore_merges": True}, pre_tokenizer=None)
    tokenizer = Tokenizer.load(folder)
    assert top < end["id"]
    ids = tokenizer.encode("<|im_end|>", add_special_tokens=False)
    assert end["id"] not in ids
    assert tokenizer.decode(ids) == "<|im_end|>"


def test_lone_surrogates_are_refused_by_name(tokenizer: Tokenizer) -> None:
    with pytest.raises(InvalidRequest) as caught:
        tokenizer.encode("ab\ud800c", add_special_tokens=True, field="messages[0].content")
    assert caught.value.field == "messages[0].content"
    str(caught.value).encode()


LONG_TEXT = "the quick brown fox " * 80_000


@pytest.mark.socket
def test_other_threads_run_while_megabytes_of_text_are_encoded(byte_level: Tokenizer) -> None:
    """With the interpreter lock held, a thread beside it would count nothing meanwhile, or once between two lines of Python."""
    num_ticks, is_encoding, is_over = 0, False, threading.Event()

    def tick() -> None:
        nonlocal num_ticks
        while not is_over.wait(0.001):
            num_ticks += is_encoding

    ticker = threading.Thread(target=tick)
    ticker.start()
    try:
        is_encoding = True
        ids = byte_level.encode(LONG_TEXT, add_special_tokens=False)
        is_encoding = False
    finally:
        is_over.set()
        ticker.join()
    assert byte_level.decode(ids) == LONG_TEXT
    assert num_ticks > 10


@pytest.mark.socket
@pytest.mark.timing
def test_encoding_blocks_other_threads_for_a_small_part_of_its_time(byte_level: Tokenizer, figure: Figure) -> None:
    """With the interpreter lock held, the call is one gap for a ticker beside it. Both are measured in CPU time of this process."""
    gaps_s, done = [0.0], threading.Event()

    def tick() -> None:
        last = time.process_time()
        while not done.wait(0.001):
            now = time.process_time()
            gaps_s.append(now - last)
            last = now
        gaps_s.append(time.process_time() - last)

    ticker = threading.Thread(target=tick)
    ticker.start()
    began = time.process_time()
    byte_level.encode(LONG_TEXT, add_special_tokens=False)
    took_s = time.process_time() - began
    done.set()
    ticker.join()
    figure("longest gap", max(gaps_s) / took_s, 0.2, "of the call")


def test_every_token_has_exact_bytes(tokenizer: Tokenizer) -> None:
    text = "caf\u00e9 \u65e5\u672c\u8a9e \U0001f389 x"
    ids = tokenizer.encode(text, add_special_tokens=False)
    joined = b"".join(tokenizer.token_bytes(i) for i in ids)
    assert joined.lstrip(b" ") == text.encode()
    assert tokenizer.token_bytes(tokenizer.vocab_size) == b""
    assert tokenizer.token_bytes(-1) == b""
    assert tokenizer.token_text(tokenizer.bos_token_id or 0) in ("<|begin|>", "<s>")


def test_partial_characters_show_as_replacement_but_keep_their_bytes(byte_level: Tokenizer) -> None:
    token_id = byte_level.token_to_id("\u0142")  # the byte 0xA0 in the byte-level table
    assert token_id is not None
    assert byte_level.token_bytes(token_id) == b"\xa0"
    assert byte_level.token_text(token_id) == "\ufffd"


def test_facts_of_the_folder(byte_level: Tokenizer, byte_level_folder: Path) -> None:
    from hashlib import sha256

    assert byte_level.vocab_size == oracle(byte_level).get_vocab_size(with_added_tokens=True)
    assert byte_level.digest == sha256((byte_level_folder / "tokenizer.json").read_bytes()).hexdigest()
    assert byte_level.id_to_token(byte_level.vocab_size) is None


def test_truncation_and_padding_saved_in_the_file_are_not_applied(tmp_path: Path, byte_level_folder: Path) -> None:
    folder = _changed(
        tmp_path / "m",
        byte_level_folder,
        truncation={"direction": "Right", "max_length": 4, "strategy": "LongestFirst", "stride": 0},
        padding={
            "strategy": {"Fixed": 8},
            "direction": "Right",
            "pad_to_multiple_of": None,
            "pad_id": 0,
            "pad_type_id": 0,
            "pad_token": "!",
        },
    )
    text = "Hello world, this is longer than four tokens"
    tokenizer = Tokenizer.load(folder)
    assert tokenizer.decode(tokenizer.encode(text, add_special_tokens=True)) == text


@pytest.mark.parametrize("name", ["tokenizer.model", "vocab.json", "tekken.json"])
def test_folders_without_a_tokenizer_json_are_refused_by_name(tmp_path: Path, name: str) -> None:
    (tmp_path / name).write_bytes(b"x")
    with pytest.raises(CheckpointError, match=name.replace(".", r"\.")) as caught:
        Tokenizer.load(tmp_path)
    assert "tokenizer.json" in str(caught.value)


@pytest.mark.parametrize("content", [b"", b"{", b"[]", b"\xff\xfe", b"{}", b"[" * 100_000, b'{"model": {"type": "BPE"}}'])
def test_damaged_files_are_refused_with_the_file_name(tmp_path: Path, content: bytes) -> None:
    (tmp_path / "tokenizer.json").write_bytes(content)
    with pytest.raises(CheckpointError, match=r"tokenizer\.json"):
        Tokenizer.load(tmp_path)


def test_missing_file_is_refused(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match="missing"):
        Tokenizer.load(tmp_path)


@pytest.mark.parametrize("decoder", [None, {"type": "WordPiece", "prefix": "##", "cleanup": True}, {"type": "CTC"}])
def test_decoders_of_other_model_families_are_refused(tmp_path: Path, byte_level_folder: Path, decoder: object) -> None:
    from headrace.text.token_bytes import spelling_of

    with pytest.raises(CheckpointError, match="decoder"):
        spelling_of(decoder)


def test_damaged_config_beside_a_good_tokenizer_is_refused(tmp_path: Path, byte_level_folder: Path) -> None:
    folder = _changed(tmp_path / "m", byte_level_folder)
    (folder / "tokenizer_config.json").write_text("{nonsense")
    with pytest.raises(CheckpointError, match=r"tokenizer_config\.json"):
        Tokenizer.load(folder)


def test_a_megabyte_of_control_tokens_costs_little_more_than_a_megabyte_of_text(byte_level: Tokenizer) -> None:
    text = "<|im_end|>\n" * 30_000
    ids = byte_level.encode(text, add_special_tokens=True)  # a quadratic step would take longer than a test may
    assert growth(lambda size: partial(byte_level.encode, text[:size], add_special_tokens=True), 40_000) < 4.2
    assert byte_level.decode(ids) == text
    assert not any(i in byte_level.special_ids for i in ids[1:])
