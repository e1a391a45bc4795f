"""Reads tokenizer_config.json, and special_tokens_map.json and added_tokens.json of older folders, as transformers does.

`tokenizer_class`, `add_bos_token` and `add_eos_token` are not read, since tokenizer.json says that.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from headrace.core.errors import CheckpointError, shorten
from headrace.text.files import read_optional_object, token_content

if TYPE_CHECKING:
    import tokenizers

FILE = "tokenizer_config.json"
SPECIAL_TOKEN_NAMES = ("bos_token", "eos_token", "unk_token", "sep_token", "pad_token", "cls_token", "mask_token")
_ID = re.compile(r"[0-9]{1,9}")
_FLAGS = ("special", "single_word", "lstrip", "rstrip", "normalized")

_Object = Mapping[str, object]


@dataclass(frozen=True, slots=True)
class TokenizerConfig:
    """special_texts: named or not; described: id -> token, as tokenizer.json describes it"""

    special_tokens: dict[str, str]
    special_texts: list[str]
    described: dict[int, _Object]

    def extend(self, inner: tokenizers.Tokenizer) -> None:
        """A special token without a description gets no id: the model was not trained with one.

        Raises CheckpointError for a token that would get another id than the file says.
        """
        from tokenizers import AddedToken

        texts = {token_id: str(entry["content"]) for token_id, entry in self.described.items()}
        new = [(text, token_id) for token_id, text in texts.items() if inner.token_to_id(text) is None]
        inner.add_tokens([AddedToken(texts[token_id], **self._flags(entry)) for token_id, entry in self.described.items()])
        for text, token_id in new:
            if (known_id := inner.token_to_id(text)) != token_id:
                reason = f"token {shorten(text)} has id {token_id}, and tokenizer.json leaves it {known_id}"
                raise CheckpointError(FILE, reason, "Fetch both files from one place.")
        known = {token.content for token in inner.get_added_tokens_decoder().values()}
        own = [text for text in self.special_texts if text not in known and inner.token_to_id(text) is not None]
        inner.add_tokens([AddedToken(text, special=True, normalized=False) for text in own])

    def _flags(self, entry: _Object) -> dict[str, bool]:
        flags = {name: entry.get(name) is True for name in _FLAGS}
        return {**flags, "special": flags["special"] or entry["content"] in self.special_tokens.values()}


def read_tokenizer_config(folder: Path) -> TokenizerConfig:
    """Raises CheckpointError."""
    config, older = (_without_nulls(read_optional_object(folder / file)) for file in (FILE, "special_tokens_map.json"))
    is_older = "added_tokens_decoder" not in config
    merged = {**config, **older} if is_older else {**older, **config}
    special_tokens = dict(_named(merged))
    special_texts = list(dict.fromkeys([*special_tokens.values(), *_unnamed(merged)]))
    described = _in_added_tokens(folder, special_texts) if is_older else _in_decoder(config["added_tokens_decoder"])
    return TokenizerConfig(special_tokens, special_texts, described)


def _without_nulls(values: _Object) -> dict[str, object]:
    return {name: value for name, value in values.items() if value is not None}


def _named(merged: _Object) -> Iterator[tuple[str, str]]:
    """(name, text): fields called `..._token`, and objects of tokens by name."""
    fields = [(name, value) for name, value in merged.items() if name.endswith("_token")]
    for field in ("extra_special_tokens", "model_specific_special_tokens"):
        if isinstance(by_name := merged.get(field), Mapping):
            fields += by_name.items()
    for name, value in fields:
        if (text := token_content(value)) is not None:
            yield name, text


def _unnamed(merged: _Object) -> list[str]:
    listed = merged.get("extra_special_tokens") or merged.get("additional_special_tokens")
    texts = [token_content(value) for value in listed] if isinstance(listed, list) else []
    return [text for text in texts if text is not None]


def _in_decoder(given: object) -> dict[int, _Object]:
    described: dict[int, _Object] = {}
    for key, entry in given.items() if isinstance(given, Mapping) else [("", None)]:
        if _ID.fullmatch(key) is None or not isinstance(entry, Mapping) or token_content(entry) is None:
            raise CheckpointError(FILE, "added_tokens_decoder must be an object of ids and tokens with a content")
        described[int(key)] = entry
    return dict(sorted(described.items()))


def _in_added_tokens(folder: Path, special_texts: list[str]) -> dict[int, _Object]:
    described = {}
    for text, token_id in read_optional_object(folder / "added_tokens.json").items():
        if not text or isinstance(token_id, bool) or not isinstance(token_id, int):
            raise CheckpointError("added_tokens.json", "must be an object of tokens and ids")
        is_special = text in special_texts
        described[token_id] = {"content": text, "special": is_special, "normalized": not is_special}
    return dict(sorted(described.items()))
