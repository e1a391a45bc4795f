"""Reads the small text files of a model folder, with a bound on their size. Raises CheckpointError."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path

from headrace.core.errors import CheckpointError
from headrace.core.regular_files import check_regular
from headrace.machine.folders import inside

MAX_FILE_BYTES = 256 * 2**20


def read_bytes(path: Path, *, home: Path | None = None) -> bytes:
    """home: the model's folder, out of which no link may lead; None: the file's own folder"""
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
    try:
        return read_bytes(path, home=home).decode("utf-8-sig")
    except UnicodeDecodeError as error:
        raise CheckpointError(path.name, "is not UTF-8 text") from error


def parse_object(name: str, data: bytes) -> dict[str, object]:
    try:
        value = json.loads(data)
    except (ValueError, RecursionError) as error:
        raise CheckpointError(name, f"is not valid JSON ({str(error)[:120]})") from error
    if not isinstance(value, dict):
        raise CheckpointError(name, f"must be a JSON object, found {type(value).__name__}")
    return value


def read_optional_object(path: Path) -> dict[str, object]:
    """The JSON object in a file; {} for an absent file."""
    return parse_object(path.name, read_bytes(path)) if path.is_file() else {}


def token_content(value: object) -> str | None:
    if isinstance(value, Mapping):
        value = value.get("content")
    return value if isinstance(value, str) and value else None
