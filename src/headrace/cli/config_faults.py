"""Finds every fault of a configuration at once, each with its line in the file.

This module gives each error its line, or the variable that set the value. `cli.config_mending` finds the errors.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

from headrace.cli.config import ENV_PREFIX
from headrace.cli.config_mending import each_error, parent
from headrace.cli.config_origins import origin_of
from headrace.cli.config_variables import apply_variable, nearest_variable, variables
from headrace.cli.config_yaml import mapping_of, parse_document, read_text
from headrace.cli.serve_config import ServeConfig
from headrace.core.errors import ConfigError

OTHER_VARIABLES = ("HEADRACE_API_KEY", "HEADRACE_CACHE_DIR", "HEADRACE_KEEP_PACKED", "HEADRACE_STREAM_WATCH")
"""Variables that are read, but are not part of the configuration."""


@dataclass(frozen=True, slots=True)
class ConfigFault:
    """One fault. line: line in the file, from 1; None for a fault of a variable, which `error` names"""

    error: ConfigError
    line: int | None

    def message(self, file: Path) -> str:
        """The line to print. It begins with the file and the line, if the fault has a line."""
        return str(self.error) if self.line is None else f"{file}:{self.line}: {self.error}"


def faults(file: Path, environment: Mapping[str, str]) -> list[ConfigFault]:
    """All faults of a file and the environment, in the order of their lines.

    Raises ConfigError if the file cannot be read or is not YAML: nothing else of it can be checked then.
    """
    document = parse_document(read_text(file), str(file))
    raw, lines = mapping_of(document.value, file), document.lines
    found = [
        ConfigFault(ConfigError(path, f"is given twice, first on line {first_line}", "Leave one of them out."), line)
        for path, line, first_line in document.repeated
    ]
    for name, steps in variables(environment, ENV_PREFIX):
        try:
            apply_variable(ServeConfig, raw, name, steps, environment[name], ENV_PREFIX)
        except ConfigError as error:
            found.append(ConfigFault(error, None))
    for fault in each_error(raw):
        origin = origin_of(fault.where, environment, ENV_PREFIX)
        if origin is None:
            found.append(ConfigFault(fault, _line(lines, fault.where)))
        elif origin not in {other.error.where for other in found}:
            found.append(ConfigFault(ConfigError(origin, fault.reason, fault.remedy), None))
    return sorted(found, key=lambda fault: (fault.line is None, fault.line))


def _line(lines: Mapping[str, int], where: str) -> int:
    """The line of the value at `where`, or else of the nearest section around it that is in the file."""
    while where and where not in lines:
        where = parent(where)
    return lines.get(where, 1)


def unread_variables(environment: Mapping[str, str]) -> Iterator[str]:
    """A message for each HEADRACE_ variable that nothing reads, except those that Kubernetes sets for a service named headrace."""
    known = {name for name, _ in variables(environment, ENV_PREFIX)}
    for name, value in sorted(environment.items()):
        if not name.startswith(ENV_PREFIX) or name in known or name in OTHER_VARIABLES or _is_service(name, value):
            continue
        nearest = nearest_variable(ServeConfig, name, ENV_PREFIX)
        yield f"{name} is not read." + (f" Did you mean {nearest}?" if nearest else "")


def _is_service(name: str, value: str) -> bool:
    return re.search(r"_SERVICE_(HOST|PORT)|_PORT_\d+_(TCP|UDP)", name) is not None or value.startswith(("tcp://", "udp://"))
