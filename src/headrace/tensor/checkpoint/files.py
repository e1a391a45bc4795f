"""Opens the files of a checkpoint folder safely: no path may lead out of the folder, JSON has a size limit."""

from __future__ import annotations

import json
import math
from collections import Counter
from pathlib import Path
from typing import NoReturn

from headrace.core.errors import CheckpointError, shorten
from headrace.machine.folders import inside

MAX_JSON_BYTES = 4 * 2**20
MAX_CONTAINERS = 2**17
"""Objects and lists in one document. With MAX_JSON_BYTES it bounds the memory of a hostile document: about 50 MiB."""

MAX_DEPTH = 64


def decode_json(file: str, text: bytes) -> dict[str, object]:
    """A JSON object without duplicate keys, NaN or infinities, after a byte order mark or without. Raises CheckpointError naming `file`."""
    if text.count(b"[") + text.count(b"{") > MAX_CONTAINERS:
        raise CheckpointError(file, f"more than {MAX_CONTAINERS} objects and lists in one JSON document")
    try:
        value = json.loads(text.decode("utf-8-sig"), object_pairs_hook=_unique, parse_constant=_no_constant, parse_float=_finite)
    except RecursionError:
        raise CheckpointError(file, "JSON nested too deeply") from None
    except ValueError as error:  # JSONDecodeError and UnicodeDecodeError are ValueErrors
        raise CheckpointError(file, f"not valid JSON ({error})") from None
    if not isinstance(value, dict):
        raise CheckpointError(file, "the JSON document is not an object")
    _check_depth(file, value)
    return value


def _check_depth(file: str, value: object) -> None:
    """The same bound whatever stack Python has."""
    level: list[object] = [value]
    for _ in range(MAX_DEPTH):
        level = [
            inner for outer in level for inner in (outer.values() if isinstance(outer, dict) else outer if isinstance(outer, list) else ())
        ]
        if not level:
            return
    raise CheckpointError(file, f"JSON nested more than {MAX_DEPTH} deep")


def _unique(pairs: list[tuple[str, object]]) -> dict[str, object]:
    made = dict(pairs)
    if len(made) != len(pairs):
        repeated = next(name for name, count in Counter(name for name, _ in pairs).items() if count > 1)
        raise ValueError(f"the key {shorten(repeated)} appears twice in one object")
    return made


def _finite(text: str) -> float:
    value = float(text)
    if math.isinf(value):
        raise ValueError(f"{shorten(text)} is beyond every number")
    return value


def _no_constant(name: str) -> NoReturn:
    raise ValueError(f"{name} is not JSON")


def read_json(folder: Path, name: str) -> dict[str, object]:
    path = inside(folder, name)
    file = str(path)
    if not path.is_file():
        raise CheckpointError(file, "not a regular file")
    try:
        with path.open("rb") as stream:
            text = stream.read(MAX_JSON_BYTES + 1)
    except OSError as error:
        raise CheckpointError(file, f"cannot be read ({error.strerror})") from error
    if len(text) > MAX_JSON_BYTES:
        raise CheckpointError(file, f"more than {MAX_JSON_BYTES} bytes of JSON")
    return decode_json(file, text)
