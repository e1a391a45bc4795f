"""Which tokens end a sequence: all that some file of the folder names.

They are ids in generation_config.json and config.json, and the tokenizer's `eos_token`, a text. A fine-tune often changes one of these
files alone: its tokenizer gets the end of a turn as eos_token, and the ids beside it stay the base model's. One token too many is a token
that the model does not write; one that is left out is an answer that does not end.

The tokenizer's files are read as data: an engine needs no tokenizer. What they mean for text is in `text.tokenizer`.
"""

from __future__ import annotations

import json
import logging
import re
from collections.abc import Iterator
from pathlib import Path

from headrace.core.errors import CheckpointError, shorten
from headrace.core.folders import inside
from headrace.tensor.checkpoint.config import ConfigFile, read_generation_config

log = logging.getLogger(__name__)

MAX_EOS_TOKEN_IDS = 64
"""In one file."""
MAX_TOKENIZER_BYTES = 256 * 2**20
"""As in `text.files`."""


def read_end_tokens(folder: Path, config: ConfigFile, vocab_size: int) -> tuple[int, ...]:
    """Ids of the end tokens, each once; empty when no file names one. An eos_token that the model cannot write is logged and left out.

    Raises: CheckpointError for an id outside the vocabulary in generation_config.json or config.json, and for a damaged file.
    """
    owners = read_generation_config(folder, config), config, config.section("text_config")
    ids = [token_id for owner in owners for token_id in _eos_token_ids(owner, vocab_size)]
    for token, file in _eos_tokens(folder).items():
        token_id = _token_id(folder, token)
        if token_id is not None and 0 <= token_id < vocab_size:
            ids.append(token_id)
        elif (folder / "tokenizer.json").is_file():
            found = "is not in the vocabulary" if token_id is None else f"has id {token_id}, outside vocab_size = {vocab_size}"
            log.warning("%s: eos_token %s %s, so it ends no answer", folder / file, shorten(token), found)
    return tuple(dict.fromkeys(ids))


def _eos_token_ids(config: ConfigFile, vocab_size: int) -> list[int]:
    value = config.values.get("eos_token_id")
    given: list[object] = value if isinstance(value, list) else [] if value is None else [value]
    if len(given) > MAX_EOS_TOKEN_IDS:
        config.refuse("eos_token_id", f"more than {MAX_EOS_TOKEN_IDS} ids")
    ids: list[int] = []
    for token_id in given:
        if isinstance(token_id, bool) or not isinstance(token_id, int) or not 0 <= token_id < vocab_size:
            config.refuse("eos_token_id", f"must be token ids from 0 to {vocab_size - 1}")
        ids.append(token_id)
    return ids


def _eos_tokens(folder: Path) -> dict[str, str]:
    """Text -> file of each `eos_token`, which is a string or an object with a `content`."""
    found = {}
    for file in ("tokenizer_config.json", "special_tokens_map.json"):
        for name, value in _members(folder, file):
            match name, value:
                case "eos_token", str(token) | {"content": str(token)} if token:
                    found[token] = file
    return found


def _token_id(folder: Path, token: str) -> int | None:
    """The id in tokenizer.json, or of a token that tokenizer_config.json adds to it; None where neither has the token."""
    for name, value in _members(folder, "tokenizer.json"):  # the vocabulary stands last, and is seldom asked
        match name, value:
            case "added_tokens", list():
                found = [entry.get("id") for entry in value if isinstance(entry, dict) and entry.get("content") == token]
            case "model", {"vocab": dict(vocab)}:
                found = [vocab.get(token)]
            case "model", {"vocab": list(pieces)}:  # [[piece, score], ...]
                found = [number for number, piece in enumerate(pieces) if isinstance(piece, list) and piece[:1] == [token]]
            case _:
                found = []
        if found and isinstance(found[0], int):
            return found[0]
    for name, value in _members(folder, "tokenizer_config.json"):
        if name == "added_tokens_decoder" and isinstance(value, dict):
            added = [key for key, entry in value.items() if isinstance(entry, dict) and entry.get("content") == token and key.isdecimal()]
            return int(added[0]) if added else None
    return None


def _members(folder: Path, file: str) -> Iterator[tuple[str, object]]:
    """Names and values of the JSON object in a file, in order, none if there is no file. A value is decoded when it is asked for.

    Raises: CheckpointError for a file that is too large, no JSON object, or a link that leads out of the folder.
    """
    if not (folder / file).is_file():
        return
    path = inside(folder, file)
    if path.stat().st_size > MAX_TOKENIZER_BYTES:
        raise CheckpointError(str(path), f"more than {MAX_TOKENIZER_BYTES} bytes of JSON")
    try:
        yield from _decoded_members(path.read_text("utf-8-sig"))
    except OSError as error:
        raise CheckpointError(str(path), f"cannot be read ({error.strerror})") from error
    except (ValueError, IndexError, RecursionError) as error:  # the decoder's and UnicodeDecodeError are ValueErrors
        raise CheckpointError(str(path), f"not a JSON object ({shorten(str(error))})") from error


def _decoded_members(text: str) -> Iterator[tuple[str, object]]:
    decoder = json.JSONDecoder()
    position = _after(text, 0, "{")
    while text[position] != "}":
        name, position = decoder.raw_decode(text, position)
        value, position = decoder.raw_decode(text, _after(text, position, ":"))
        yield name, value
        position = _after(text, position, "")
        if text[position] != "}":
            position = _after(text, position, ",")


def _after(text: str, position: int, mark: str) -> int:
    """The position behind space, `mark` and space. Raises ValueError where something else stands."""
    found = re.compile(rf"\s*{re.escape(mark)}\s*").match(text, position)
    if found is None:
        raise ValueError(f"no {mark!r} at character {position}")
    return found.end()
