"""Reads the names of models in a registry: SCHEME://ROOT/NAME[:TAG], and oci://HOST/REPOSITORY@sha256:DIGEST."""

from __future__ import annotations

import hashlib
import re
from dataclasses import dataclass

from headrace.core.errors import ConfigError

OCI = "oci://"
SCHEMES = ("file", "s3", "gs", "oci")
LATEST = "latest"
NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,95}")
"""Names a model, a version, an alias or a file: no part of a path that leads elsewhere."""
DIGEST = re.compile(r"sha256:([0-9a-f]{64})")
_OCI_ROOT = re.compile(r"oci://(?:[A-Za-z0-9.-]+|\[[0-9A-Fa-f:.]+\])(?::[0-9]{1,5})?(?:/[a-z0-9]+(?:[._-]+[a-z0-9]+)*)*")

EXAMPLE = "Write for example s3://bucket/models/llama-8b:2, file:///srv/models/llama-8b:stable, or oci://host/models/llama-8b:2."


@dataclass(frozen=True, slots=True)
class Reference:
    """registry: the URL of the registry's root; tag: a version or an alias, of an OCI registry a tag or "sha256:" and a digest"""

    registry: str
    name: str
    tag: str = LATEST

    def __str__(self) -> str:
        return f"{self.registry}/{self.name}{'@' if DIGEST.fullmatch(self.tag) else ':'}{self.tag}"


def artifact_key(name: str, digest: str) -> str:
    """Names a version of an OCI registry in a node's cache: its manifest does not say the model's name, by which a folder is called."""
    return hashlib.sha256(f"{name}@{digest}".encode()).hexdigest()


def is_reference(text: str) -> bool:
    return text.startswith(tuple(f"{scheme}://" for scheme in SCHEMES))


def check_registry(text: str) -> str:
    """The URL without slashes at its end. Raises ConfigError."""
    url = text.rstrip("/")
    if not is_reference(url):
        raise ConfigError("registry", f"{text!r} begins with none of {', '.join(f'{scheme}://' for scheme in SCHEMES)}", EXAMPLE)
    if any(part in ("", ".", "..") for part in url.partition("://")[2].lstrip("/").split("/")) or not url.isprintable():
        raise ConfigError("registry", f"{text!r} has an empty part, or one of dots alone", EXAMPLE)
    if url.startswith(OCI) and _OCI_ROOT.fullmatch(url) is None:
        raise ConfigError("registry", f"{text!r} is no host and path of an OCI registry", EXAMPLE)
    return url


def read_reference(text: str) -> Reference:
    """Raises ConfigError."""
    root, _, last = text.rpartition("/")
    name, at, tag = last.partition("@" if text.startswith(OCI) and "@" in last else ":")
    check_name("model", name)
    if at != "@":
        tag = tag if at else LATEST
        check_name("tag", tag)
    elif DIGEST.fullmatch(tag) is None:
        raise ConfigError("tag", f"{tag!r} is no digest", "Write @sha256: and 64 hexadecimal digits.")
    return Reference(check_registry(root), name, tag)


def check_name(what: str, name: str) -> None:
    if NAME.fullmatch(name) is None:
        raise ConfigError(
            what, f"{name!r} is no name in a registry", "Use letters, digits and ._- only, a letter or digit first, at most 96."
        )
