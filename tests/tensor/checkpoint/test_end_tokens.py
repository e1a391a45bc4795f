"""Tests that an end token ends the answer, whichever file of the folder names it."""

from __future__ import annotations

import json
from typing import Any

import pytest
import text_kit

from headrace.core.errors import CheckpointError

pytestmark = pytest.mark.pure

TURN_END = {"content": "<|im_end|>", "lstrip": False, "normalized": False, "rstrip": False, "single_word": False}


def write(folder: Any, file: str, value: object) -> None:
    text_kit.write_json(folder.path / file, value)


def write_tokenizer(folder: Any, *, added: dict[str, int] | None = None, model: object = None) -> None:
    """A tokenizer.json as the library writes it: its vocabulary last."""
    tokens = [{"id": token_id, "content": text, "special": True} for text, token_id in (added or {}).items()]
    write(folder, "tokenizer.json", {"version": "1.0", "added_tokens": tokens, "normalizer": None, "model": model or {"vocab": {}}})


def change(folder: Any, **fields: object) -> None:
    folder.config |= fields
    folder.write_config()


def test_all_files_are_asked_and_each_id_counts_once(folder: Any) -> None:
    write_tokenizer(folder, added={"<|im_end|>": 7, "<|endoftext|>": 3, "</s>": 2})
    write(folder, "tokenizer_config.json", {"eos_token": "<|im_end|>"})
    assert folder.load().eos_token_ids == (2, 7)
    write(folder, "generation_config.json", {"eos_token_id": [3, 5, 3]})
    assert folder.load().eos_token_ids == (3, 5, 2, 7)
    write(folder, "generation_config.json", {"temperature": 0.5, "eos_token_id": None})
    change(folder, eos_token_id=[7, 4], text_config={"eos_token_id": 9})
    assert folder.load().eos_token_ids == (7, 4, 9)
    change(folder, eos_token_id=None, text_config=None)
    assert folder.load().eos_token_ids == (7,)


@pytest.mark.parametrize("token", ["<|im_end|>", TURN_END], ids=["text", "object"])
@pytest.mark.parametrize("file", ["tokenizer_config.json", "special_tokens_map.json"])
def test_a_fine_tune_may_name_the_end_of_a_turn_in_its_tokenizer_alone(folder: Any, file: str, token: object) -> None:
    """LlamaFactory writes it there and leaves the base model's ids: answers went on behind the end of the turn."""
    write_tokenizer(folder, added={"<|endoftext|>": 2, "<|im_end|>": 7})
    write(folder, file, {"eos_token": token, "pad_token": "<|endoftext|>", "model_max_length": 1e30})
    assert folder.load().eos_token_ids == (2, 7)


def test_files_of_the_tokenizer_that_disagree_are_both_heard(folder: Any) -> None:
    write_tokenizer(folder, added={"<|endoftext|>": 6, "<|im_end|>": 7})
    write(folder, "tokenizer_config.json", {"eos_token": "<|im_end|>"})
    write(folder, "special_tokens_map.json", {"eos_token": "<|endoftext|>"})
    assert folder.load().eos_token_ids == (2, 7, 6)


@pytest.mark.parametrize(
    "model",
    [{"vocab": {"a": 0, "</s>": 7}, "merges": []}, {"vocab": [["a", 0.0]] * 7 + [["</s>", -1.0]], "unk_id": 0}],
    ids=["BPE", "Unigram"],
)
def test_an_end_token_may_be_one_of_the_model_s_own(folder: Any, model: object) -> None:
    write_tokenizer(folder, model=model)
    write(folder, "tokenizer_config.json", {"eos_token": "</s>"})
    assert folder.load().eos_token_ids == (2, 7)


def test_an_end_token_may_be_added_by_the_tokenizer_s_configuration(folder: Any) -> None:
    write_tokenizer(folder)
    write(folder, "tokenizer_config.json", {"eos_token": "<|im_end|>", "added_tokens_decoder": {"7": {**TURN_END, "special": True}}})
    assert folder.load().eos_token_ids == (2, 7)


@pytest.mark.parametrize(
    ("added", "said"), [({}, '"<|im_end|>" is not in the vocabulary'), ({"<|im_end|>": 13}, "has id 13, outside vocab_size = 13")]
)
def test_an_end_token_that_the_model_cannot_write_is_named_and_ends_nothing(
    folder: Any, added: dict[str, int], said: str, caplog: pytest.LogCaptureFixture
) -> None:
    write_tokenizer(folder, added=added)
    write(folder, "tokenizer_config.json", {"eos_token": "<|im_end|>"})
    assert folder.load().eos_token_ids == (2,)
    (line,) = [record.message for record in caplog.records if "eos_token" in record.message]
    assert said in line
    assert "tokenizer_config.json" in line


@pytest.mark.parametrize("token", [None, "", 7, ["<|im_end|>"], {"text": "<|im_end|>"}])
def test_what_is_no_token_ends_nothing(folder: Any, token: object, caplog: pytest.LogCaptureFixture) -> None:
    write_tokenizer(folder, added={"<|im_end|>": 7})
    write(folder, "tokenizer_config.json", {"eos_token": token})
    assert folder.load().eos_token_ids == (2,)
    assert not caplog.records


def test_a_folder_without_a_tokenizer_has_the_ids_of_its_configuration(folder: Any, caplog: pytest.LogCaptureFixture) -> None:
    write(folder, "tokenizer_config.json", {"eos_token": "<|im_end|>"})
    assert folder.load().eos_token_ids == (2,)
    assert not caplog.records
    change(folder, eos_token_id=None)
    (folder.path / "tokenizer_config.json").unlink()
    assert folder.load().eos_token_ids == ()


@pytest.mark.parametrize("config", [{}, {"added_tokens_decoder": None}], ids=["without", "null"])
def test_an_end_token_may_stand_in_the_added_tokens_of_an_older_folder(folder: Any, config: dict[str, object]) -> None:
    """The tokenizer takes the id from there; an engine that did not would go on behind the end of the turn."""
    write_tokenizer(folder)
    write(folder, "tokenizer_config.json", {"eos_token": "<|im_end|>", **config})
    write(folder, "added_tokens.json", {"<|im_end|>": 7})
    assert folder.load().eos_token_ids == (2, 7)
    write(folder, "tokenizer_config.json", {"eos_token": "<|im_end|>", "added_tokens_decoder": {}})
    assert folder.load().eos_token_ids == (2,)


@pytest.mark.parametrize(
    ("stale", "logged"),
    [(2, "2"), (50256, "50256"), (-1, "-1"), ("7", '"7"'), (True, "true"), ([3, [7]], "[3, [7]]"), (3.5, "3.5"), ([7, 2], "[2]")],
    ids=str,
)
@pytest.mark.parametrize("section", [None, "text_config"])
def test_a_stale_id_of_config_json_ends_no_answer(
    folder: Any, section: str | None, stale: object, logged: str, caplog: pytest.LogCaptureFixture
) -> None:
    """Llama's class has 2 as its default. In a byte-level vocabulary that is "#", and answers ended at their first heading."""
    write_tokenizer(folder, added={"<|endoftext|>": 5, "<|im_end|>": 7}, model={"vocab": {"!": 0, '"': 1, "#": 2, "$": 3}})
    write(folder, "tokenizer_config.json", {"eos_token": "<|im_end|>"})
    write(folder, "generation_config.json", {"eos_token_id": [7, 5]})
    change(folder, **({"eos_token_id": stale} if section is None else {"eos_token_id": 7, section: {"eos_token_id": stale}}))
    assert folder.load().eos_token_ids == (7, 5)
    (line,) = [record.message for record in caplog.records if "eos_token_id" in record.message]
    assert logged in line.replace("'", '"').lower()
    assert "generation_config.json names" in line


@pytest.mark.parametrize("file", ["tokenizer.json", "tokenizer_config.json", "added_tokens.json"])
def test_an_added_token_that_config_json_alone_names_ends_answers(folder: Any, file: str, caplog: pytest.LogCaptureFixture) -> None:
    """Llama 3's generation_config.json once had the end of text alone."""
    write_tokenizer(folder, added={"<|eot_id|>": 9} if file == "tokenizer.json" else {})
    if file == "tokenizer_config.json":
        write(folder, file, {"added_tokens_decoder": {"9": {"content": "<|eot_id|>"}, "9" * 5000: {"content": "a"}}})
    elif file == "added_tokens.json":
        write(folder, file, {"<|eot_id|>": 9})
    write(folder, "generation_config.json", {"eos_token_id": 7})
    change(folder, eos_token_id=[7, 9])
    assert folder.load().eos_token_ids == (7, 9)
    assert not caplog.records


def test_a_word_is_no_id(folder: Any, caplog: pytest.LogCaptureFixture) -> None:
    write_tokenizer(folder, model={"vocab": {"</s>": True}})
    write(folder, "tokenizer_config.json", {"eos_token": "</s>"})
    write(folder, "added_tokens.json", {"</s>": True})
    assert folder.load().eos_token_ids == (2,)
    assert "is not in the vocabulary" in caplog.text


def test_the_vocabulary_is_not_decoded_for_a_token_that_stands_before_it(folder: Any) -> None:
    write_tokenizer(folder, added={"<|im_end|>": 7})
    write(folder, "tokenizer_config.json", {"eos_token": "<|im_end|>"})
    path = folder.path / "tokenizer.json"
    path.write_text(path.read_text().replace('{"vocab": {}}', "what is not read cannot be wrong"))
    assert folder.load().eos_token_ids == (2, 7)


@pytest.mark.parametrize(
    "text",
    ["", "[]", "{", '{"eos_token" "a"}', '{"eos_token": "a"', '{"eos_token": "a" 1}', "[" * 100_000, '{"a": ' * 5000],
    ids=["empty", "list", "open", "no-colon", "no-end", "no-comma", "deep-lists", "deep-objects"],
)
@pytest.mark.parametrize("file", ["tokenizer_config.json", "special_tokens_map.json", "tokenizer.json"])
def test_a_damaged_file_is_named(folder: Any, file: str, text: str) -> None:
    write(folder, "tokenizer_config.json", {"eos_token": "a"})
    (folder.path / file).write_text(text)
    with pytest.raises(CheckpointError) as caught:
        folder.load()
    assert caught.value.file.endswith(file)


def test_a_byte_order_mark_and_space_are_no_damage(folder: Any) -> None:
    write_tokenizer(folder, added={"<|im_end|>": 7})
    text = json.dumps({"bos_token": None, "eos_token": "<|im_end|>"}, indent=2).replace(":", " :")
    (folder.path / "tokenizer_config.json").write_bytes(b"\xef\xbb\xbf \r\n" + text.encode() + b"\r\n")
    assert folder.load().eos_token_ids == (2, 7)


def test_a_tokenizer_that_is_a_link_out_of_the_folder(folder: Any, tmp_path_factory: pytest.TempPathFactory) -> None:
    outside = tmp_path_factory.mktemp("outside") / "any.json"
    outside.write_text("{}")
    (folder.path / "tokenizer_config.json").symlink_to(outside)
    with pytest.raises(CheckpointError, match="leads out of the folder"):
        folder.load()
