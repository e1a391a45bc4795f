"""Reads a file of librdkafka's properties: NAME=VALUE on each line, and lines of comment that begin with `#`.

Only names on a list are allowed, since other properties load code, run a command or turn verification off. An error shows no value except
the path of a file, since any other may be a secret.
"""

from __future__ import annotations

import os
import re

from headrace.core.errors import ConfigError
from headrace.machine.private_files import check_private_file, read_private_text

PROPERTIES: dict[str, tuple[str, ...]] = {
    "security.protocol": ("PLAINTEXT", "SSL", "SASL_PLAINTEXT", "SASL_SSL"),
    "ssl.endpoint.identification.algorithm": ("HTTPS",),
    "sasl.mechanism": ("PLAIN", "SCRAM-SHA-256", "SCRAM-SHA-512"),
    **dict.fromkeys(("sasl.username", "sasl.password", "client.id"), ()),
    **dict.fromkeys(("ssl.ca.location", "ssl.certificate.location", "ssl.key.location", "ssl.key.password"), ()),
}
"""Name -> the values that it may have, in letters of either size; none: any text."""


NEEDS = {
    "ssl.certificate.location": "ssl.key.location",
    "ssl.key.location": "ssl.certificate.location",
    "ssl.key.password": "ssl.key.location",
}
"""A property -> the one without which librdkafka ignores it."""


def read_properties(where: str, path: str) -> dict[str, str]:
    """sasl.mechanisms becomes sasl.mechanism. Raises ConfigError."""
    found: dict[str, str] = {}
    for number, line in enumerate(read_private_text(where, path).splitlines(), 1):
        if not line.strip() or line.lstrip().startswith("#"):
            continue
        name, equals, value = (part.strip() for part in line.partition("="))
        name = name.replace("sasl.mechanisms", "sasl.mechanism")
        if name not in PROPERTIES:
            shown = f" ({name})" if equals and re.fullmatch(r"[a-z_]+(\.[a-z_]+)+", name) else ""
            remedy = f"Leave it out. Known: {', '.join(PROPERTIES)}."
            raise ConfigError(where, f"{path}: line {number}{shown} is no property that is read", remedy)
        choices = PROPERTIES[name]
        if not value or (choices and value.upper() not in choices):
            raise ConfigError(where, f"{path}: {name} is {'not one of ' + ', '.join(choices) if choices else 'empty'}")
        if name in found:
            raise ConfigError(where, f"{path}: line {number}: {name} is given twice")
        found[name] = value.upper() if choices else value
    protocol = found.get("security.protocol", "")
    needed = ["sasl.mechanism", "sasl.username", "sasl.password"] if "SASL" in protocol else []
    for name in ("security.protocol", *needed):  # a mechanism that is not named is GSSAPI, for which librdkafka runs a command
        if name not in found:
            raise ConfigError(where, f"{path}: {name} is missing")
    for name, value in found.items():
        layer = name.partition(".")[0].upper()
        if layer in ("SASL", "SSL") and layer not in protocol:
            raise ConfigError(where, f"{path}: {name} has no effect without {layer} in security.protocol")
        if NEEDS.get(name, name) not in found:
            raise ConfigError(where, f"{path}: {name} has no effect without {NEEDS[name]}")
        if name.endswith(".location") and not (os.access(value, os.R_OK) and _is_file(name, value)):
            raise ConfigError(where, f"{path}: {name}: {value} cannot be read", "It is a file that the user of Headrace can read.")
    if "ssl.key.location" in found:
        check_private_file(where, found["ssl.key.location"])
    return found


def _is_file(name: str, path: str) -> bool:
    """Authorities may also be in a folder."""
    return os.path.isfile(path) or (name == "ssl.ca.location" and os.path.isdir(path))
