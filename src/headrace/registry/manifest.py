"""Says what a version consists of: its files with their sizes and SHA-256, and what people choose it by. Nothing in it names code.

A version is what a folder in the Hugging Face layout holds at its top: weights in safetensors or GGUF, and text files.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from fnmatch import fnmatch
from functools import cached_property
from pathlib import Path
from typing import Any

from headrace.core.errors import CheckpointError, ConfigError
from headrace.core.regular_files import MAX_FILE_BYTES, read_file
from headrace.core.strict_decode import decode, plain
from headrace.machine.folders import inside
from headrace.registry.names import NAME

KEPT = ("*.safetensors", "*.gguf", "*.json", "*.jinja", "*.txt")
MAX_FILES = 1024
MAX_BYTES = 8 << 40
MAX_MANIFEST_BYTES = 1 << 20
HEX = frozenset("0123456789abcdef")


@dataclass(frozen=True, slots=True)
class StoredFile:
    path: str
    size: int
    sha256: str


@dataclass(frozen=True)
class Manifest:
    """facts: architecture, precision, context and others, as `describe` found them"""

    name: str
    version: str
    files: tuple[StoredFile, ...]
    facts: dict[str, str] = field(default_factory=dict)

    @cached_property
    def num_bytes(self) -> int:
        return sum(file.size for file in self.files)

    def encoded(self) -> bytes:
        """The same bytes for the same manifest."""
        return json.dumps(plain(self), sort_keys=True, indent=1).encode()

    def has_content_of(self, other: Manifest) -> bool:
        return set(self.files) == set(other.files)


def digest_of(data: bytes) -> str:
    return hashlib.sha256(data).hexdigest()


def read_manifest(data: bytes, where: str) -> Manifest:
    """Raises CheckpointError, naming `where`, for anything that is no manifest."""
    try:
        manifest = decode(Manifest, json.loads(data))
    except (ConfigError, ValueError, RecursionError) as error:
        raise CheckpointError(where, f"is no manifest: {error}") from error
    return checked(manifest, where)


def checked(manifest: Manifest, where: str) -> Manifest:
    """Raises CheckpointError, naming `where`."""
    problem = _problem(manifest)
    if problem:
        raise CheckpointError(where, problem)
    return manifest


def _problem(manifest: Manifest) -> str:
    names = [manifest.name, manifest.version, *(file.path for file in manifest.files)]
    if wrong := [name for name in names if NAME.fullmatch(name) is None]:
        return f"names {wrong[0]!r}, which is no name in a registry"
    if not 1 <= len(manifest.files) <= MAX_FILES:
        return f"has {len(manifest.files)} files, outside 1..{MAX_FILES}"
    if len({file.path for file in manifest.files}) < len(manifest.files):
        return "names a file twice"
    for file in manifest.files:
        if not is_kept(file.path):
            return f"names {file.path}, which is none of {', '.join(KEPT)}"
        if file.size < 0 or len(file.sha256) != 64 or not HEX.issuperset(file.sha256):
            return f"gives {file.path} no valid size or SHA-256"
    return f"has {manifest.num_bytes} bytes, more than {MAX_BYTES}" if manifest.num_bytes > MAX_BYTES else ""


def is_kept(name: str) -> bool:
    return NAME.fullmatch(name) is not None and any(fnmatch(name, pattern) for pattern in KEPT)


def files_of(folder: Path) -> tuple[list[str], list[str]]:
    """The names that a version of this folder has, and those left out. Raises CheckpointError where no weights are there."""
    kept: list[str] = []
    left_out: list[str] = []
    for path in sorted(folder.iterdir()):
        (kept if path.is_file() and is_kept(path.name) else left_out).append(path.name)
    if not any(name.endswith((".safetensors", ".gguf")) for name in kept):
        raise CheckpointError(str(folder), "holds no weights in .safetensors or .gguf", "Give a model's folder.")
    if len(kept) > MAX_FILES:
        raise CheckpointError(str(folder), f"holds {len(kept)} files, more than {MAX_FILES}")
    for name in kept:
        inside(folder, name)
    return kept, left_out


def describe(folder: Path, files: list[str]) -> dict[str, str]:
    """What the configuration says; only what is there. Raises CheckpointError for one that is no JSON."""
    facts = {"format": "gguf" if any(name.endswith(".gguf") for name in files) else "safetensors"}
    if "adapter_config.json" in files:
        config = _json(folder / "adapter_config.json")
        return {**facts, "kind": "adapter", "base": str(config.get("base_model_name_or_path", "")), "rank": str(config.get("r", ""))}
    if "config.json" not in files:
        return facts
    config = _json(folder / "config.json")
    text: Mapping[str, Any] = config["text_config"] if isinstance(config.get("text_config"), dict) else config
    quantization = config.get("quantization_config")
    method = quantization.get("quant_method") if isinstance(quantization, dict) else None
    found = {
        "architecture": (config.get("architectures") or [None])[0],
        "precision": method or text.get("dtype") or text.get("torch_dtype"),
        "context": text.get("max_position_embeddings"),
        "layers": text.get("num_hidden_layers"),
        "kv_heads": text.get("num_key_value_heads") or text.get("num_attention_heads"),
        "vocabulary": text.get("vocab_size"),
    }
    return {**facts, **{name: str(value) for name, value in found.items() if value is not None}}


def _json(path: Path) -> Mapping[str, Any]:
    try:
        value = json.loads(read_file(path, MAX_FILE_BYTES))
    except (OSError, ValueError, RecursionError) as error:
        raise CheckpointError(str(path), f"cannot be read: {error}") from error
    if not isinstance(value, dict):
        raise CheckpointError(str(path), "is no JSON object")
    return value
