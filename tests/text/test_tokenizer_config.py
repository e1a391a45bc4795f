"""Tests that tokenizer_config.json beside tokenizer.json means what transformers reads into the two."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import text_kit
from transformers import PreTrainedTokenizerFast

from headrace.core.errors import CheckpointError
from headrace.text.folder import load_text
from headrace.text.tokenizer import Tokenizer

pytestmark = pytest.mark.pure

PLAIN = {"lstrip": False, "normalized": False, "rstrip": False, "single_word": False}
TEXTS = ["Hello world", "a<|im_end|>b", " <tool> x <tool>", "user </s> <pad>", ""]


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return text_kit.save_byte_level(tmp_path / "m")


def change(folder: Path, file: str = "tokenizer_config.json", **fields: object) -> None:
    path = folder / file
    known = json.loads(path.read_text()) if path.exists() else {}
    text_kit.write_json(path, {**known, **fields})


def change_tokens(folder: Path, **flags: dict[str, Any] | None) -> None:
    """Change added tokens of tokenizer.json by their text's letters; None leaves the token out of the list, not out of the vocabulary."""
    document = json.loads((folder / "tokenizer.json").read_text())
    kept = []
    for token in document["added_tokens"]:
        change = flags.get(token["content"].strip("<|>/"), {})
        if change is None:
            document["model"]["vocab"][token["content"]] = token["id"]
        else:
            kept.append({**token, **change})
    text_kit.write_json(folder / "tokenizer.json", {**document, "added_tokens": kept})


def assert_same(folder: Path) -> Tokenizer:
    """Ids, special ids and named tokens are those of transformers."""
    ours, theirs = Tokenizer.load(folder), PreTrainedTokenizerFast.from_pretrained(folder)
    for text in TEXTS:
        for add in (True, False):
            expected = theirs(text, add_special_tokens=add)["input_ids"]
            assert ours.encode(text, add_special_tokens=add, allow_control_tokens=True) == expected
    assert ours.special_tokens == theirs.special_tokens_map
    decoded = theirs.added_tokens_decoder
    assert ours.special_ids == {token_id for token_id, token in decoded.items() if token.special}
    return ours


def test_names_of_special_tokens(folder: Path) -> None:
    change(folder, image_token="<|im_start|>", extra_special_tokens={"turn_token": "<|im_end|>", "audio": {"content": "<think>", **PLAIN}})
    change(folder, add_prefix_space=False, model_max_length=1e30, tokenizer_class="OwnTokenizer", pad_token=None)
    ours = Tokenizer.load(folder)
    assert ours.special_tokens == {
        "bos_token": "<|begin|>", "eos_token": "<|im_end|>", "image_token": "<|im_start|>", "turn_token": "<|im_end|>", "audio": "<think>",
    }  # fmt: skip


@pytest.mark.parametrize("has_decoder", [False, True])
def test_the_older_map_of_special_tokens_wins_where_no_tokens_are_described(folder: Path, has_decoder: bool) -> None:
    token_id = Tokenizer.load(folder).token_to_id("<|im_end|>")
    if has_decoder:
        change(folder, added_tokens_decoder={str(token_id): {"content": "<|im_end|>", **PLAIN, "special": True}})
    change(folder, "special_tokens_map.json", eos_token="<|im_start|>")
    assert assert_same(folder).special_tokens["eos_token"] == ("<|im_end|>" if has_decoder else "<|im_start|>")


def test_a_token_that_only_the_configuration_describes_is_matched_in_a_text(folder: Path) -> None:
    """It was spelled by the model's own rules, which the model never saw."""
    size = Tokenizer.load(folder).vocab_size
    added = {str(size): {"content": "<tool>", **PLAIN, "rstrip": True, "special": False}}
    change(folder, added_tokens_decoder={**added, str(size + 1): {"content": "<pad>", **PLAIN, "special": True}}, pad_token="<pad>")
    ours = assert_same(folder)
    assert (ours.token_to_id("<tool>"), ours.token_to_id("<pad>")) == (size, size + 1)
    assert ours.bound is not None
    assert not ours.bound.counts_spaces
    text_kit.write_json(folder / "config.json", {"vocab_size": size})
    with pytest.raises(CheckpointError, match='token "<tool>" has id'):
        load_text(folder)


def test_a_token_of_the_vocabulary_that_is_named_is_matched_in_a_text(folder: Path) -> None:
    change_tokens(folder, im_end=None)
    change(folder, additional_special_tokens=["<|im_start|>", "<think>"])
    ours = assert_same(folder)
    assert ours.token_to_id("<|im_end|>") in ours.special_ids


def test_flags_are_those_of_the_configuration(folder: Path) -> None:
    change_tokens(folder, im_end={"special": False})
    token_id = Tokenizer.load(folder).token_to_id("<|im_end|>")
    assert token_id not in Tokenizer.load(folder).special_ids
    change(folder, added_tokens_decoder={str(token_id): {"content": "<|im_end|>", **PLAIN, "special": True}})
    assert token_id in assert_same(folder).special_ids


def test_tokens_of_an_older_folder(folder: Path) -> None:
    size = Tokenizer.load(folder).vocab_size
    change(folder, "added_tokens.json", **{"<pad>": size, "<tool>": size + 1})
    change(folder, "special_tokens_map.json", pad_token="<pad>")
    assert_same(folder)


@pytest.mark.parametrize("adds", [True, False])
@pytest.mark.parametrize("in_tokenizer", [True, False])
def test_tokenizer_json_says_what_opens_a_text(tmp_path: Path, adds: bool, in_tokenizer: bool) -> None:
    folder = text_kit.save_byte_level(tmp_path / "m", bos=in_tokenizer)
    change(folder, add_bos_token=adds, add_eos_token=adds)
    ours = assert_same(folder)
    assert (ours.encode("a", add_special_tokens=True)[0] == ours.bos_token_id) is in_tokenizer


@pytest.mark.parametrize(
    ("file", "fields", "said"),
    [
        ("tokenizer_config.json", {"added_tokens_decoder": []}, "an object of ids and tokens"),
        ("tokenizer_config.json", {"added_tokens_decoder": {"x": {"content": "a"}}}, "an object of ids and tokens"),
        ("tokenizer_config.json", {"added_tokens_decoder": {"9" * 5000: {"content": "a"}}}, "an object of ids and tokens"),
        ("tokenizer_config.json", {"added_tokens_decoder": {"7": "a"}}, "an object of ids and tokens"),
        ("tokenizer_config.json", {"added_tokens_decoder": {"9999": {"content": "<new>"}}}, 'token "<new>" has id 9999'),
        ("added_tokens.json", {"<new>": "7"}, "an object of tokens and ids"),
    ],
)
def test_tokens_that_contradict_tokenizer_json_are_named(folder: Path, file: str, fields: dict[str, object], said: str) -> None:
    change(folder, file, **fields)
    with pytest.raises(CheckpointError, match=said) as caught:
        Tokenizer.load(folder)
    assert caught.value.file == file


def test_a_special_token_that_the_vocabulary_lacks_gets_no_id(folder: Path) -> None:
    """A default of the class that wrote the file, which the model never saw."""
    size = Tokenizer.load(folder).vocab_size
    change(folder, unk_token="<unk>", cls_token="[CLS]")
    ours = Tokenizer.load(folder)
    assert ours.vocab_size == size
    assert ours.token_to_id("[CLS]") is None


def test_a_byte_order_mark_is_no_part_of_a_file(folder: Path) -> None:
    before = load_text(folder)
    for path in folder.iterdir():
        path.write_bytes(b"\xef\xbb\xbf" + path.read_bytes())
    after, chat = load_text(folder), [{"role": "user", "content": "Hello"}]
    assert after.tokenizer.special_tokens == before.tokenizer.special_tokens
    assert after.template.encode(after.tokenizer, chat) == before.template.encode(before.tokenizer, chat)
