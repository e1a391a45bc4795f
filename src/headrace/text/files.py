"""Reads the small text files of a model folder (config.json, tokenizer.json, templates), with a bound on their size.

Every failure is a CheckpointError that names the file and the reason.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path

from headrace.core.errors import CheckpointError
from headrace.core.regular_files import check_regular
from headrace.machine.folders import inside

MAX_FILE_BYTES = 256 * 2**20
"""No tokenizer.json, config or template is larger; a bigger file is a mistake or an attack."""


def read_bytes(path: Path, *, home: Path | None = None) -> bytes:
    """The file's bytes. Raises CheckpointError when the file is missing, too large, unreadable, or a link that leads out of the folder.

    home  the model's folder where the file is in a folder below; None: the file's own folder
    """
    folder = home or path.parent
    inside(folder, str(path.relative_to(folder)))
    try:
        check_regular(path)
        size = path.stat().st_size
        if size > MAX_FILE_BYTES:
            raise CheckpointError(path.name, f"{size} bytes is over the limit of {MAX_FILE_BYTES}")
        return path.read_bytes()
    except OSError as error:
        raise CheckpointError(path.name, f"cannot be read ({error.strerror or type(error).__name__})") from error


def read_text(path: Path, *, home: Path | None = None) -> str:
    """The file's UTF-8 text, without a byte order mark.

    Raises CheckpointError when `read_bytes` cannot read the file, and when the file is not UTF-8. home: see `read_bytes`
    """
    try:
        return read_bytes(path, home=home).decode("utf-8-sig")
    except UnicodeDecodeError as error:
        raise CheckpointError(path.name, "is not UTF-8 text") from error


def parse_object(name: str, data: bytes) -> dict[str, object]:
    """The JSON object in `data`. Raises CheckpointError naming the file `name` for invalid JSON, and for JSON that is no object."""
    try:
        value = json.loads(data)
    except (ValueError, RecursionError) as error:
        raise CheckpointError(name, f"is not valid JSON ({str(error)[:120]})") from error
    if not isinstance(value, dict):
        raise CheckpointError(name, f"must be a JSON object, found {type(value).__name__}")
    return value


def read_optional_object(path: Path) -> dict[str, object]:
    """The JSON object in a file; {} for an absent file. Raises CheckpointError for a file that is unreadable or holds no JSON object."""
    return parse_object(path.name, read_bytes(path)) if path.is_file() else {}


def token_content(value: object) -> str | None:
    """Text of a special token in a tokenizer config: a string, or an object with a string `content`. None for any other value."""
    if isinstance(value, Mapping):
        value = value.get("content")
    return value if isinstance(value, str) and value else None
