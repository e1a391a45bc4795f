"""Tests that tokenizers made from a file's keys give the ids of the tokenizers that the keys were made from."""

from __future__ import annotations

import json
import random
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
import tokenizers
import torch
from gguf_files import byte_level_keys, entry, gguf_bytes

from headrace.bundled import FOLDER
from headrace.core.errors import CheckpointError, InvalidRequest
from headrace.tensor.checkpoint.config import ConfigFile, read_config
from headrace.tensor.checkpoint.end_tokens import read_end_tokens
from headrace.tensor.checkpoint.gguf.folder import make_folder
from headrace.tensor.checkpoint.gguf.tokenizer import CUT_RULES, make_text_files
from headrace.text.folder import TextModel, load_text
from headrace.text.tokenizer import Tokenizer

pytestmark = pytest.mark.pure

TINY = FOLDER / "headrace-tiny"
SHAPE: dict[str, object] = {
    "general.architecture": "llama", "llama.embedding_length": 32, "llama.feed_forward_length": 32, "llama.block_count": 1,
    "llama.attention.head_count": 2, "llama.context_length": 64, "llama.attention.layer_norm_rms_epsilon": 1e-5,
}  # fmt: skip
SPACE = "\u2581"
WORDS = [
    "the",
    "then",
    "there",
    "hen",
    "here",
    "low",
    "lowest",
    "new",
    "\u00e9t\u00e9",
    "\U0001f389",
    "\u65e5\u672c",
    "123",
    "(",
    "\n",
    "\t",
    "it's",
]


def made_folder(tmp_path: Path, keys: dict[str, object]) -> Path:
    tokens = keys["tokenizer.ggml.tokens"]
    assert isinstance(tokens, list)
    path = tmp_path / "model.gguf"
    path.write_bytes(gguf_bytes({**SHAPE, **keys}, {"token_embd.weight": entry(torch.zeros(len(tokens), 32), "F16")}))
    return make_folder(path)


def made_text(tmp_path: Path, keys: dict[str, object]) -> TextModel:
    return load_text(made_folder(tmp_path, keys))


def texts() -> list[str]:
    """Lines of documents and of source, and words with odd characters and spaces between them."""
    rng = random.Random(0)
    lines = [line for file in ("README.md", "chat_template.jinja") for line in (TINY / file).read_text().splitlines() if line]
    return [*lines, *("".join(rng.choice(WORDS) + rng.choice(["", " ", "  "]) for _ in range(8)) for _ in range(300))]


def ids(tokenizer: Tokenizer, text: str) -> list[int]:
    return list(tokenizer.encode(text, add_special_tokens=True))


def test_the_bundled_tokenizer_comes_back_from_its_keys(tmp_path: Path) -> None:
    made, own = made_text(tmp_path, byte_level_keys(TINY, "headrace")), load_text(TINY)
    samples = [*texts(), "<|im_start|>user\nhi<|im_end|>", "<tool_call>{}</tool_call>"]
    assert len(samples) > 300
    for text in samples:
        assert ids(made.tokenizer, text) == ids(own.tokenizer, text)
        assert made.tokenizer.decode(ids(own.tokenizer, text)) == own.tokenizer.decode(ids(own.tokenizer, text))
    assert made.tokenizer.special_ids == own.tokenizer.special_ids
    assert made.tokenizer.control_tokens == own.tokenizer.control_tokens
    folder = made_folder(tmp_path, byte_level_keys(TINY, "headrace"))
    size = read_config(TINY).integer("vocab_size", 1, 10**6)
    assert set(read_end_tokens(folder, read_config(folder), size)) == set(read_end_tokens(TINY, read_config(TINY), size))


@pytest.mark.parametrize(
    ("pre", "text", "pieces"),
    [
        ("gpt-2", "We'LL see 12345 things!!\n\n ok", ["We", "'", "LL", " see", " 12345", " things", "!!", "\n\n", " ok"]),
        ("llama-bpe", "We'LL see 12345 things!!\n\n ok", ["We", "'LL", " see", " ", "123", "45", " things", "!!\n\n", " ok"]),
        ("qwen2", "We'LL see 12 a!!\n\n ok", ["We", "'LL", " see", " ", "1", "2", " a", "!!\n\n", " ok"]),
        ("tekken", "don'tStop HTTPServer 123 a//b\n\n ok",
         ["don", "'t", "Stop", " HTTPServer", " ", "1", "2", "3", " a", "//", "b", "\n\n", " ok"]),
        ("tekken", "\u0301A", ["\u0301", "A"]),
        ("default", "it's 12345!", ["it", "'", "s", " ", "123", "45", "!"]),
    ],
)  # fmt: skip
def test_a_text_is_cut_as_the_rule_of_that_name_cuts(pre: str, text: str, pieces: list[str]) -> None:
    """A vocabulary without merges but for whole pieces cannot show the cuts, so the library's pre-tokenizer is asked."""
    document = make_text_files(ConfigFile("x", {**byte_level_keys(TINY, pre)}), 2560).tokenizer
    library = tokenizers.Tokenizer.from_str(json.dumps(document))
    assert [text[begin:end] for _, (begin, end) in library.pre_tokenizer.pre_tokenize_str(text)] == pieces
    assert document["model"]["ignore_merges"] == (pre in ("llama-bpe", "tekken"))  # type: ignore[index]


def pieces_by_score() -> tuple[list[str], list[float], list[int]]:
    """A SentencePiece vocabulary: control tokens, bytes, pieces that are better the longer and the earlier they are."""
    tokens, kinds = ["<unk>", "<s>", "</s>"], [2, 3, 3]
    tokens += [f"<0x{byte:02X}>" for byte in range(256)]
    kinds += [6] * 256
    merged = ["th", f"{SPACE}th", "he", f"{SPACE}the", "en", "hen", "re", "er", f"{SPACE}l", "ow", f"{SPACE}low", f"{SPACE}n", "ew",
              f"{SPACE}new", "the", "here", f"{SPACE}the" + "re", "est", "st", f"{SPACE}{SPACE}"]  # fmt: skip
    letters = [SPACE, *"abcdefghijklmnopqrstuvwxyz'()123_\n"]
    scores = [0.0] * len(tokens) + [-float(rank) for rank in range(len(merged))] + [-1e6 - rank for rank in range(len(letters))]
    tokens += [*merged, *letters, "<start>"]
    return tokens, [*scores, 0.0], [*kinds, *([1] * (len(merged) + len(letters))), 4]


def slow_sentencepiece(text: str, tokens: list[str], scores: list[float]) -> list[int]:
    """SentencePiece's rule, plainly: as long as two neighbours make a piece, those with the best score, the first of equals, become it."""
    number = {token: index for index, token in enumerate(tokens)}
    parts = list(SPACE + text.replace(" ", SPACE))
    while True:
        pairs = [(scores[number[a + b]], -at) for at, (a, b) in enumerate(pairwise(parts)) if a + b in number]
        if not pairs:
            break
        at = -max(pairs)[1]
        parts[at : at + 2] = [parts[at] + parts[at + 1]]
    spelled = [[part] if part in number else [f"<0x{byte:02X}>" for byte in part.encode()] for part in parts]
    return [number[piece] for pieces in spelled for piece in pieces]


def sentencepiece_keys(**changes: object) -> dict[str, object]:
    tokens, scores, kinds = pieces_by_score()
    named = {f"tokenizer.ggml.{name}_token_id": number for name, number in (("unknown", 0), ("bos", 1), ("eos", 2))}
    lists: dict[str, Any] = {"tokens": tokens, "scores": scores, "token_type": kinds}
    return {"tokenizer.ggml.model": "llama", **{f"tokenizer.ggml.{name}": value for name, value in lists.items()}, **named, **changes}


def test_merges_by_score_are_sentencepieces(tmp_path: Path) -> None:
    tokens, scores, _ = pieces_by_score()
    tokenizer = made_text(tmp_path, sentencepiece_keys()).tokenizer
    for text in texts():
        found = ids(tokenizer, text)
        assert found == [1, *slow_sentencepiece(text, tokens, scores)]
        assert tokenizer.decode(found) == text
    assert ids(tokenizer, "x<start>the")[3] == len(tokens) - 1
    assert tokenizer.special_tokens == {"bos_token": "<s>", "eos_token": "</s>", "unk_token": "<unk>"}


def test_a_file_may_leave_out_the_space_and_the_first_token(tmp_path: Path) -> None:
    changes: dict[str, object] = {"tokenizer.ggml.add_space_prefix": False, "tokenizer.ggml.add_bos_token": False}
    tokenizer = made_text(tmp_path, sentencepiece_keys(**changes, **{"tokenizer.ggml.add_eos_token": True})).tokenizer
    tokens = pieces_by_score()[0]
    assert [tokens[index] for index in ids(tokenizer, "then")] == ["th", "en", "</s>"]
    assert tokenizer.decode(ids(tokenizer, " then low")) == " then low"


def test_phi3s_control_tokens_take_the_white_space_after_them() -> None:
    keys = sentencepiece_keys(**{"general.architecture": "phi3"})
    added: Any = make_text_files(ConfigFile("x", keys), 10_000).tokenizer["added_tokens"]
    assert {token["content"] for token in added if token["rstrip"]} == {"</s>"}


@pytest.mark.parametrize(
    ("changes", "named"),
    [
        ({"tokenizer.ggml.model": "t5"}, 'tokenizer.ggml.model = "t5": only gpt2'),
        ({"tokenizer.ggml.pre": "viking"}, 'tokenizer.ggml.pre = "viking": is not supported. Supported: gpt-2, llama-bpe'),
        ({"tokenizer.ggml.merges": ["a"]}, "merges: .a. is no pair"),
        ({"tokenizer.ggml.merges": ["a zzzzzz"]}, "merges: .a zzzzzz. is no pair"),
        ({"tokenizer.ggml.token_type": [1, 2]}, "token_type: lists 2 types that are numbers, of 2560 tokens"),
        ({"tokenizer.ggml.eos_token_id": 2560}, "eos_token_id = 2560"),
        ({"tokenizer.ggml.tokens": ["a", "b", "a"], "tokenizer.ggml.token_type": [1, 1, 1]}, "tokens: .a. has the ids 0 and 2"),
        ({"tokenizer.ggml.tokens": ["a", ""], "tokenizer.ggml.token_type": [1, 1]}, "tokens: holds what is no text"),
        ({"tokenizer.ggml.tokens": [1, 2]}, "tokens: holds what is no text"),
        ({"tokenizer.ggml.tokens": []}, "tokens: lists 0 tokens"),
        ({"tokenizer.ggml.tokens": ["a", 600 * "b"], "tokenizer.ggml.token_type": [1, 1]}, "a token of 600 characters, and 512 are"),
        ({"tokenizer.ggml.tokens": ["a", "b"], "tokenizer.ggml.token_type": [1, "x"]}, "lists 1 types that are numbers, of 2"),
    ],
)
def test_keys_that_make_no_tokenizer_are_refused(changes: dict[str, object], named: str) -> None:
    with pytest.raises(CheckpointError, match=named):
        make_text_files(ConfigFile("model.gguf", {**byte_level_keys(TINY, "headrace"), **changes}), 2560)


def without_merges(kept: float) -> dict[str, object]:
    keys = byte_level_keys(TINY, "headrace")
    merges: Any = keys.pop("tokenizer.ggml.merges")
    return {**keys, "tokenizer.ggml.merges": merges[: int(kept * len(merges))]} if kept else keys


@pytest.mark.parametrize(
    ("keys", "named"),
    [
        (without_merges(0.0), "merges: makes 0 of 2294 tokens of more than one byte: texts would fall into single bytes"),
        (without_merges(1e-6), "merges: makes 0 of 2294 tokens of more than one byte"),
        (without_merges(0.4), r"merges: makes \d+ of 2294 tokens of more than one byte"),
        (sentencepiece_keys(**{"tokenizer.ggml.scores": [-1000.0] * len(pieces_by_score()[0])}), "scores: has 1 different scores for"),
        (sentencepiece_keys(**{"tokenizer.ggml.scores": [0.0] * len(pieces_by_score()[0])}), "nothing says which is made first"),
    ],
    ids=["no key", "empty", "cut off", "one score", "zeros"],
)
def test_a_tokenizer_that_has_lost_its_merges_is_refused(keys: dict[str, object], named: str) -> None:
    """It would spell texts in bytes and letters, which no model of that vocabulary was trained on."""
    with pytest.raises(CheckpointError, match=named):
        make_text_files(ConfigFile("model.gguf", keys), 10_000)


def test_a_vocabulary_of_bytes_needs_no_merges(tmp_path: Path) -> None:
    keys = without_merges(0.0)
    tokens: Any = [token for token in keys["tokenizer.ggml.tokens"] if len(token) == 1]  # type: ignore[attr-defined]
    bytes_alone = {f"tokenizer.ggml.{name}": value for name, value in {"model": "gpt2", "pre": "gpt-2", "tokens": tokens}.items()}
    assert len(ids(made_text(tmp_path, bytes_alone).tokenizer, "abc d")) == 5


TOOLS = "{% for tool in tools %}[{{ tool.function.name }}]{% endfor %}"


@pytest.mark.parametrize("has_default", [True, False])
@pytest.mark.parametrize("listed", [["tool_use"], None])
def test_named_templates_are_those_of_a_folder(has_default: bool, listed: list[str] | None, tmp_path: Path) -> None:
    plain = "{% for message in messages %}{{ message.content }}{% endfor %}"
    keys = sentencepiece_keys(**{"tokenizer.chat_template.tool_use": TOOLS + plain, "tokenizer.chat_template.rag": ""})
    if has_default:
        keys["tokenizer.chat_template"] = plain
    if listed:
        keys["tokenizer.chat_templates"] = listed
    template = made_text(tmp_path, keys).template
    tool = {"type": "function", "function": {"name": "weather", "parameters": {}}}
    assert template.render([{"role": "user", "content": "the"}], tools=[tool]) == "[weather]the"
    if has_default:
        assert template.render([{"role": "user", "content": "the"}]) == "the"
    else:
        with pytest.raises(InvalidRequest, match="This model only has: tool_use"):
            template.render([{"role": "user", "content": "the"}])


@pytest.mark.parametrize(
    ("changes", "named"),
    [
        ({"tokenizer.chat_templates": ["rag"]}, 'chat_templates = .*: lists "rag", and there is no key tokenizer.chat_template."rag"'),
        ({"tokenizer.chat_templates": "rag"}, "chat_templates = .*: must be a list"),
        ({"tokenizer.chat_template.tool_use": [TOOLS]}, "chat_template.tool_use = .*: must be a string"),
        ({"tokenizer.chat_template": 7}, "chat_template = 7: must be a string"),
    ],
)
def test_templates_that_are_no_texts_are_refused(changes: dict[str, object], named: str) -> None:
    with pytest.raises(CheckpointError, match=named):
        make_text_files(ConfigFile("model.gguf", sentencepiece_keys(**changes)), 10_000)


def test_more_tokens_than_rows_and_scores_that_are_missing_are_refused() -> None:
    with pytest.raises(CheckpointError, match="lists 2560 tokens, the embedding has 2559 rows"):
        make_text_files(ConfigFile("x", byte_level_keys(TINY, "headrace")), 2559)
    with pytest.raises(CheckpointError, match="scores: must be a number for each"):
        make_text_files(ConfigFile("x", sentencepiece_keys(**{"tokenizer.ggml.scores": [1.0]})), 10_000)


def test_pieces_that_make_each_other_in_too_many_ways_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    """Pieces of one letter, each longer than the last: their merges grow with the square of their number."""
    monkeypatch.setattr("headrace.tensor.checkpoint.gguf.tokenizer.MAX_MERGES", 1000)
    pieces = [n * "a" for n in range(1, 60)]
    keys = sentencepiece_keys(
        **{"tokenizer.ggml.tokens": pieces, "tokenizer.ggml.token_type": [1] * 59, "tokenizer.ggml.scores": [0.0] * 59}
    )
    with pytest.raises(CheckpointError, match="in more than 1000 ways"):
        make_text_files(ConfigFile("x", keys), 10_000)


def test_a_token_of_an_answers_end_ends_it_whatever_its_type() -> None:
    keys = byte_level_keys(TINY, "headrace")
    tokens = [*keys["tokenizer.ggml.tokens"], "<end_of_turn>"]  # type: ignore[misc]
    kinds = [*keys["tokenizer.ggml.token_type"], 4]  # type: ignore[misc]
    made = make_text_files(ConfigFile("x", {**keys, "tokenizer.ggml.tokens": tokens, "tokenizer.ggml.token_type": kinds}), 2561)
    assert 2560 in made.generation["eos_token_id"]  # type: ignore[operator]
    added: Any = made.tokenizer["added_tokens"]
    assert added[-1]["content"] == "<end_of_turn>"
    assert added[-1]["special"]


def test_every_rule_can_be_built() -> None:
    for name in CUT_RULES:
        assert make_text_files(ConfigFile("x", byte_level_keys(TINY, name)), 2560).tokenizer["model"]
