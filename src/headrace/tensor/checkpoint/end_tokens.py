"""Which tokens end a sequence: ids in generation_config.json and config.json, and the tokenizer's `eos_token`, a text.

config.json may hold its class's default, an id of another vocabulary. Beside a generation_config.json that names ids, config.json's count
only where they are added tokens.
"""

from __future__ import annotations

import json
import logging
import re
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import TypeGuard

from headrace.core.errors import CheckpointError, shorten
from headrace.machine.folders import inside
from headrace.tensor.checkpoint.config import ConfigFile, read_generation_config

log = logging.getLogger(__name__)

MAX_EOS_TOKEN_IDS = 64
MAX_TOKENIZER_BYTES = 256 * 2**20
"""As in `text.files`."""
_ID = re.compile(r"[0-9]{1,9}")


def read_end_tokens(folder: Path, config: ConfigFile, vocab_size: int) -> tuple[int, ...]:
    """Ids of the end tokens, each once; empty when no file names one.

    Raises CheckpointError for a damaged file, and for an id outside the vocabulary in generation_config.json, or in config.json where that
    file alone names ids.
    """
    generation, configs = read_generation_config(folder, config), (config, config.section("text_config"))
    ids = _checked_ids(generation, vocab_size)
    if generation is not config and ids:
        ids += _confirmed_ids(folder, configs, ids, vocab_size)
    else:
        ids += [token_id for owner in configs for token_id in _checked_ids(owner, vocab_size)]
    for token, file in _eos_tokens(folder).items():
        token_id = _token_id(folder, token)
        if token_id is not None and 0 <= token_id < vocab_size:
            ids.append(token_id)
        elif (folder / "tokenizer.json").is_file():
            found = "is not in the vocabulary" if token_id is None else f"has id {token_id}, outside vocab_size = {vocab_size}"
            log.warning("%s: eos_token %s %s, so it ends no answer", folder / file, shorten(token), found)
    return tuple(dict.fromkeys(ids))


def _checked_ids(config: ConfigFile, vocab_size: int) -> list[int]:
    ids = [token_id for token_id in _given_ids(config) if _is_id(token_id) and 0 <= token_id < vocab_size]
    if len(ids) < len(_given_ids(config)):
        config.refuse("eos_token_id", f"must be token ids from 0 to {vocab_size - 1}")
    return ids


def _confirmed_ids(folder: Path, configs: Iterable[ConfigFile], named: list[int], vocab_size: int) -> list[int]:
    given = [value for config in configs for value in _given_ids(config) if value not in named]
    if not given:
        return []
    added = {**_described_tokens(folder), **_listed_tokens(folder)}.values()
    ids = [value for value in given if _is_id(value) and 0 <= value < vocab_size and value in added]
    if left_out := [value for value in given if value not in ids]:
        reason = "generation_config.json names the end tokens, and the tokenizer has no added token with this id"
        log.warning("%s: eos_token_id %s ends no answer: %s", folder / "config.json", shorten(left_out), reason)
    return ids


def _given_ids(config: ConfigFile) -> list[object]:
    value = config.values.get("eos_token_id")
    given: list[object] = value if isinstance(value, list) else [] if value is None else [value]
    if len(given) > MAX_EOS_TOKEN_IDS:
        config.refuse("eos_token_id", f"more than {MAX_EOS_TOKEN_IDS} ids")
    return given


def _is_id(value: object) -> TypeGuard[int]:
    return isinstance(value, int) and not isinstance(value, bool)


def _eos_tokens(folder: Path) -> dict[str, str]:
    found = {}
    for file in ("tokenizer_config.json", "special_tokens_map.json"):
        for name, value in _members(folder, file):
            match name, value:
                case "eos_token", str(token) | {"content": str(token)} if token:
                    found[token] = file
    return found


def _token_id(folder: Path, token: str) -> int | None:
    if (listed := _listed_tokens(folder).get(token)) is not None:
        return listed
    found: object = None
    match _member(folder, "tokenizer.json", "model"):
        case {"vocab": dict(vocab)}:
            found = vocab.get(token)
        case {"vocab": list(pieces)}:  # [[piece, score], ...]
            found = next((number for number, piece in enumerate(pieces) if isinstance(piece, list) and piece[:1] == [token]), None)
    return found if _is_id(found) else _described_tokens(folder).get(token)


def _listed_tokens(folder: Path) -> dict[str, int]:
    listed = _member(folder, "tokenizer.json", "added_tokens")
    entries = [entry for entry in listed if isinstance(entry, dict)] if isinstance(listed, list) else []
    return _ids_by_text((entry.get("content"), entry.get("id")) for entry in entries)


def _described_tokens(folder: Path) -> dict[str, int]:
    """Beside tokenizer.json, as `text.tokenizer_config` reads them: a folder without `added_tokens_decoder` is an older one."""
    described = _member(folder, "tokenizer_config.json", "added_tokens_decoder")
    if described is None:
        return _ids_by_text(_members(folder, "added_tokens.json"))
    entries = described.items() if isinstance(described, dict) else ()
    return _ids_by_text((entry.get("content"), int(key)) for key, entry in entries if isinstance(entry, dict) and _ID.fullmatch(key))


def _ids_by_text(pairs: Iterable[tuple[object, object]]) -> dict[str, int]:
    return {text: token_id for text, token_id in pairs if isinstance(text, str) and _is_id(token_id)}


def _member(folder: Path, file: str, name: str) -> object:
    return next((value for found, value in _members(folder, file) if found == name), None)


def _members(folder: Path, file: str) -> Iterator[tuple[str, object]]:
    """A value is decoded when it is asked for.

    Raises CheckpointError for a file that is too large, no JSON object, or a link that leads out of the folder.
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
    found = re.compile(rf"\s*{re.escape(mark)}\s*").match(text, position)
    if found is None:
        raise ValueError(f"no {mark!r} at character {position}")
    return found.end()
