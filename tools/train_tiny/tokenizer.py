"""Trains the byte-level BPE tokenizer and writes it in the Hugging Face layout.

A word is cut into the same pieces with and without the space before it, so that copying a word from a sentence
(` teal`) into a JSON string (`"teal"`) changes its first token at most, and always in the same way. Ordinary BPE does not
give that: it cut ` apple` into ` a`, `pp`, `le` and `apple` into `ap`, `ple`. Digits are split singly, so that sums and
reversed numbers line up token by token. Only training texts are read: words of the held-out side end up in pieces, as an
unknown word would.
"""

from __future__ import annotations

import json
import string
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, pre_tokenizers, trainers

from tools.train_tiny.chat import CHAT_TEMPLATE, CONTROL_TOKENS, END_OF_TEXT, IM_END, MARKER_TOKENS, PAD

REST = r"\p{N}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
PATTERN = r"'(?:s|t|re|ve|m|ll|d)|[ _]?\p{L}+|" + REST
PATTERN_WITHOUT_SPACES = r"'(?:s|t|re|ve|m|ll|d)|_?\p{L}+|" + REST
SPACE = "\u0120"  # the byte-level spelling of a space


def train_tokenizer(texts: Iterable[str], *, vocab_size: int) -> Tokenizer:
    """Ids 0..3 are the control tokens, then the tool markers, the bytes, the letters after a space, the merges."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = _pre_tokenizer(PATTERN_WITHOUT_SPACES)
    tokenizer.decoder = decoders.ByteLevel()
    markers = [AddedToken(token, special=False, normalized=False) for token in MARKER_TOKENS]
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    trainer = trainers.BpeTrainer(
        vocab_size=vocab_size, special_tokens=[*CONTROL_TOKENS, *markers], initial_alphabet=alphabet, show_progress=False
    )
    tokenizer.train_from_iterator((_without_markers(text) for text in texts), trainer)
    spec = json.loads(tokenizer.to_str())
    spec["model"] = _with_spaces(spec["model"], vocab_size)
    spec["pre_tokenizer"] = json.loads(_shell(PATTERN).to_str())["pre_tokenizer"]
    for token in spec["added_tokens"]:
        token["special"] = token["content"] in CONTROL_TOKENS
    return Tokenizer.from_str(json.dumps(spec))


def _shell(pattern: str) -> Tokenizer:
    """An empty tokenizer, to have its pre-tokenizer written down."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = _pre_tokenizer(pattern)
    return tokenizer


def _pre_tokenizer(pattern: str) -> pre_tokenizers.PreTokenizer:
    return pre_tokenizers.Sequence(
        [
            pre_tokenizers.Split(Regex(pattern), behavior="isolated"),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        ]
    )


def _with_spaces(model: dict[str, Any], vocab_size: int) -> dict[str, Any]:
    """Give every merge that begins with a letter a twin that begins with a space and that letter.

    The merges of a space with one letter come first. From then on a word after a space goes through the merges of the
    bare word (a run of one repeated letter may differ), at twice the vocabulary per piece.
    """
    num_base = len(model["vocab"]) - len(model["merges"])
    vocab = {token: at for token, at in model["vocab"].items() if at < num_base}
    merges: list[tuple[str, str]] = []

    def add(left: str, right: str) -> None:
        if len(vocab) < vocab_size:
            merges.append((left, right))
            vocab.setdefault(left + right, len(vocab))

    for letter in string.ascii_letters:
        add(SPACE, letter)
    for left, right in model["merges"]:
        add(left, right)
        if left[0] in string.ascii_letters:
            add(SPACE + left, right)
    return model | {"vocab": vocab, "merges": merges}


def _without_markers(text: str) -> str:
    """The trainer would count a marker as text if it were not cut out here."""
    for token in (*CONTROL_TOKENS, *MARKER_TOKENS):
        text = text.replace(token, "\n")
    return text


def letter_pieces(tokenizer: Tokenizer) -> list[str]:
    """The pieces that consist of small letters, without the space before them: what made-up words of training are joined from."""
    return sorted(
        {piece for token in tokenizer.get_vocab() if (piece := token.removeprefix(SPACE)).isascii() and piece.isalpha() and piece.islower()}
    )


def save_tokenizer(tokenizer: Tokenizer, folder: Path) -> None:
    """Write tokenizer.json, tokenizer_config.json and chat_template.jinja."""
    tokenizer.save(str(folder / "tokenizer.json"))
    config = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "bos_token": END_OF_TEXT,
        "eos_token": IM_END,
        "pad_token": PAD,
        "unk_token": None,
        "add_bos_token": False,
        "add_eos_token": False,
        "clean_up_tokenization_spaces": False,
        "model_max_length": 2048,
        "chat_template": CHAT_TEMPLATE,
    }
    (folder / "tokenizer_config.json").write_text(json.dumps(config, indent=2) + "\n")
    (folder / "chat_template.jinja").write_text(CHAT_TEMPLATE)
