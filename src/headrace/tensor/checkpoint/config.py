"""config.json and generation_config.json: `ConfigFile` hands out checked fields, so that nothing absurd reaches a tensor."""

from __future__ import annotations

import math
import os
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NoReturn

from headrace.core.errors import CheckpointError, InvalidRequest, shorten
from headrace.core.sampling import params_from_mapping
from headrace.tensor.checkpoint.files import read_json

SAMPLING_DEFAULTS = {
    "temperature": "temperature",
    "top_p": "top_p",
    "top_k": "top_k",
    "min_p": "min_p",
    "repetition_penalty": "repetition_penalty",
    "max_new_tokens": "max_tokens",
}


@dataclass(frozen=True, slots=True)
class ConfigFile:
    """A field that is null counts as absent.

    file    named in every error
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
        value = self._value(name, default)
        if isinstance(value, bool) or not isinstance(value, int) or not low <= value <= high:
            self.refuse(name, f"must be an integer from {low} to {high}")
        return value

    def number(self, name: str, low: float, high: float, default: float | None = None) -> float:
        """low < value <= high; `default` as in `integer`."""
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
        value = self.values.get(name)
        if value is None:
            return []
        if not isinstance(value, list):
            self.refuse(name, "must be a list")
        return value

    def section(self, name: str) -> ConfigFile:
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


def read_config(folder: Path) -> ConfigFile:
    if not folder.is_dir():
        raise CheckpointError(str(folder), "not a folder", "Give a local folder in the Hugging Face layout.")
    return ConfigFile(str(folder / "config.json"), read_json(folder, "config.json"))


def read_generation_config(folder: Path, config: ConfigFile) -> ConfigFile:
    """Raises CheckpointError."""
    path = folder / "generation_config.json"
    return ConfigFile(str(path), read_json(folder, path.name)) if os.path.lexists(path) else config


def read_sampling_defaults(folder: Path, config: ConfigFile, vocab_size: int) -> dict[str, Any]:
    generation = read_generation_config(folder, config)
    sampling = {target: generation.values[name] for name, target in SAMPLING_DEFAULTS.items() if generation.has(name)}
    if generation.values.get("do_sample") is False:
        sampling["temperature"] = 0.0  # do_sample: false means greedy decoding
    try:
        params_from_mapping(sampling).checked(vocab_size=vocab_size)
    except InvalidRequest as error:
        raise CheckpointError(generation.file, str(error).removesuffix(".")) from error
    return sampling
