"""JSON files of a checkpoint folder, read as data and nothing else.

`read_json` bounds size and depth; `ConfigFile` hands out checked fields, so that nothing absurd reaches a tensor. End tokens and
sampling defaults come from generation_config.json, else from config.json. Weights are read in `tensor.checkpoint`.
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NoReturn

from headrace.core.errors import CheckpointError, InvalidRequest, shorten
from headrace.core.sampling import params_from_mapping

MAX_JSON_BYTES = 4 * 2**20
MAX_CONTAINERS = 2**17
"""Objects and lists in one document: with the bytes, what bounds the memory a hostile one can take (about 50 MiB)."""
MAX_EOS_TOKEN_IDS = 64
SAMPLING_DEFAULTS = {
    "temperature": "temperature",
    "top_p": "top_p",
    "top_k": "top_k",
    "min_p": "min_p",
    "repetition_penalty": "repetition_penalty",
    "max_new_tokens": "max_tokens",
}
"""Field of generation_config.json -> field of SamplingParams."""


def decode_json(file: str, text: bytes) -> dict[str, object]:
    """A JSON object without duplicate keys, NaN or infinities. Raises CheckpointError naming `file`."""
    if text.count(b"[") + text.count(b"{") > MAX_CONTAINERS:
        raise CheckpointError(file, f"more than {MAX_CONTAINERS} objects and lists in one JSON document")
    try:
        value = json.loads(text.decode("utf-8"), object_pairs_hook=_unique, parse_constant=_no_constant)
    except RecursionError:
        raise CheckpointError(file, "JSON nested too deeply") from None
    except ValueError as error:  # JSONDecodeError and UnicodeDecodeError are ValueErrors
        raise CheckpointError(file, f"not valid JSON ({error})") from None
    if not isinstance(value, dict):
        raise CheckpointError(file, "the JSON document is not an object")
    return value


def _unique(pairs: list[tuple[str, object]]) -> dict[str, object]:
    made = dict(pairs)
    if len(made) != len(pairs):
        raise ValueError("a key appears twice in one object")
    return made


def _no_constant(name: str) -> NoReturn:
    raise ValueError(f"{name} is not JSON")


def read_json(path: Path) -> dict[str, object]:
    """The JSON object in a regular file of at most MAX_JSON_BYTES. Raises CheckpointError."""
    file = str(path)
    try:
        if not path.is_file():
            raise CheckpointError(file, "no such file")
        with path.open("rb") as stream:
            text = stream.read(MAX_JSON_BYTES + 1)
        if len(text) > MAX_JSON_BYTES:
            raise CheckpointError(file, f"more than {MAX_JSON_BYTES} bytes of JSON")
    except OSError as error:
        raise CheckpointError(file, f"cannot be read ({error.strerror})") from error
    return decode_json(file, text)


@dataclass(frozen=True, slots=True)
class ConfigFile:
    """Fields of a JSON object, checked as they are asked for. A field that is null counts as absent.

    file    named in every error
    values  the object
    prefix  where the object stands in the file, e.g. "rope_parameters."
    """

    file: str
    values: Mapping[str, object]
    prefix: str = ""

    def has(self, name: str) -> bool:
        return self.values.get(name) is not None

    def refuse(self, name: str, reason: str, remedy: str = "") -> NoReturn:
        shown = f" = {shorten(self.values[name])}" if name in self.values else ""
        raise CheckpointError(self.file, f"{self.prefix}{name}{shown}: {reason}", remedy)

    def integer(self, name: str, low: int, high: int, default: int | None = None) -> int:
        """The integer field with low <= value <= high; `default` when absent, which must otherwise be there."""
        value = self._value(name, default)
        if isinstance(value, bool) or not isinstance(value, int) or not low <= value <= high:
            self.refuse(name, f"must be an integer from {low} to {high}")
        return value

    def number(self, name: str, low: float, high: float, default: float | None = None) -> float:
        """The number field with low < value <= high."""
        value = self._value(name, default)
        if isinstance(value, bool) or not isinstance(value, int | float) or not low < value <= high or not math.isfinite(value):
            self.refuse(name, f"must be a number above {low:g} and up to {high:g}")
        return float(value)

    def flag(self, name: str, default: bool) -> bool:
        value = self._value(name, default)
        if not isinstance(value, bool):
            self.refuse(name, "must be true or false")
        return value

    def text(self, name: str, default: str | None = None) -> str:
        value = self._value(name, default)
        if not isinstance(value, str):
            self.refuse(name, "must be a string")
        return value

    def items(self, name: str) -> list[object]:
        """The list field; empty when absent."""
        value = self.values.get(name)
        if value is None:
            return []
        if not isinstance(value, list):
            self.refuse(name, "must be a list")
        return value

    def section(self, name: str) -> ConfigFile:
        """The object field; empty when absent."""
        value = self.values.get(name)
        if value is None:
            value = {}
        if not isinstance(value, dict):
            self.refuse(name, "must be an object")
        return ConfigFile(self.file, value, f"{self.prefix}{name}.")

    def _value(self, name: str, default: object) -> object:
        value = self.values.get(name)
        if value is not None:
            return value
        if default is None:
            self.refuse(name, "is missing")
        return default


@dataclass(frozen=True, slots=True)
class GenerationDefaults:
    """eos_token_ids end a sequence; sampling holds SamplingParams fields the checkpoint's author chose."""

    eos_token_ids: tuple[int, ...]
    sampling: dict[str, Any]


def read_generation_defaults(folder: Path, config: ConfigFile, vocab_size: int) -> GenerationDefaults:
    """From generation_config.json; a field missing there is looked for in config.json. Raises CheckpointError."""
    path = folder / "generation_config.json"
    generation = ConfigFile(str(path), read_json(path)) if path.exists() else config
    eos_owner = generation if generation.has("eos_token_id") else config
    sampling = {target: generation.values[name] for name, target in SAMPLING_DEFAULTS.items() if generation.has(name)}
    try:
        params_from_mapping(sampling).checked(vocab_size=vocab_size)
    except InvalidRequest as error:
        raise CheckpointError(generation.file, str(error)) from error
    return GenerationDefaults(_eos_token_ids(eos_owner, vocab_size), sampling)


def _eos_token_ids(config: ConfigFile, vocab_size: int) -> tuple[int, ...]:
    value = config.values.get("eos_token_id")
    ids = value if isinstance(value, list) else [] if value is None else [value]
    if len(ids) > MAX_EOS_TOKEN_IDS:
        config.refuse("eos_token_id", f"more than {MAX_EOS_TOKEN_IDS} ids")
    for token_id in ids:
        if isinstance(token_id, bool) or not isinstance(token_id, int) or not 0 <= token_id < vocab_size:
            config.refuse("eos_token_id", f"must be token ids from 0 to {vocab_size - 1}")
    return tuple(dict.fromkeys(ids))
