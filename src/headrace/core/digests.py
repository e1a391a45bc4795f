"""Digests of a model folder's tokenizer and chat template; a gateway and an engine compare them in their first frames (Hello)."""

from __future__ import annotations

from collections.abc import Mapping
from hashlib import sha256

TEXT_FILES: Mapping[str, tuple[str, ...]] = {
    "tokenizer": ("tokenizer.json",),
    "template": ("chat_template.jinja", "tokenizer_config.json", "chat_template.json"),
}


def text_digests(files: Mapping[str, bytes]) -> dict[str, str]:
    """For each kind of text file, hex SHA-256 over the names and contents of its files; "" where the folder has none."""
    digests: dict[str, str] = {}
    for kind, names in TEXT_FILES.items():
        state = sha256()
        present = [name for name in names if name in files]
        for name in present:
            state.update(f"{name}\0{len(files[name])}\0".encode())
            state.update(files[name])
        digests[kind] = state.hexdigest() if present else ""
    return digests
