"""Reads the names of models in a registry: SCHEME://ROOT/NAME[:TAG]."""

from __future__ import annotations

import re
from dataclasses import dataclass

from headrace.core.errors import ConfigError

SCHEMES = ("file", "s3", "gs")
LATEST = "latest"
NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,95}")
"""Names a model, a version, an alias or a file: no part of a path that leads elsewhere."""

EXAMPLE = "Write for example s3://bucket/models/llama-8b:2, or file:///srv/models/llama-8b:stable."


@dataclass(frozen=True, slots=True)
class Reference:
    """registry: the URL of the registry's root; tag: a version or an alias"""

    registry: str
    name: str
    tag: str = LATEST

    def __str__(self) -> str:
        return f"{self.registry}/{self.name}:{self.tag}"


def is_reference(text: str) -> bool:
    return text.startswith(tuple(f"{scheme}://" for scheme in SCHEMES))


def check_registry(text: str) -> str:
    """The URL without slashes at its end. Raises ConfigError."""
    url = text.rstrip("/")
    if not is_reference(url):
        raise ConfigError("registry", f"{text!r} begins with none of {', '.join(f'{scheme}://' for scheme in SCHEMES)}", EXAMPLE)
    if any(part in ("", ".", "..") for part in url.partition("://")[2].lstrip("/").split("/")) or not url.isprintable():
        raise ConfigError("registry", f"{text!r} has an empty part, or one of dots alone", EXAMPLE)
    return url


def read_reference(text: str) -> Reference:
    """Raises ConfigError."""
    root, _, last = text.rpartition("/")
    name, colon, tag = last.partition(":")
    if not colon:
        tag = LATEST
    check_name("model", name)
    check_name("tag", tag)
    return Reference(check_registry(root), name, tag)


def check_name(what: str, name: str) -> None:
    if NAME.fullmatch(name) is None:
        raise ConfigError(
            what, f"{name!r} is no name in a registry", "Use letters, digits and ._- only, a letter or digit first, at most 96."
        )
