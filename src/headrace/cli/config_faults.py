"""Every fault of a configuration at once, each with its line in the file.

Checks stop at the first fault. So the fault is noted, its value is removed or replaced by a valid one, and the checks run again, until
they pass. The mended configuration is thrown away.
"""

from __future__ import annotations

import copy
import hashlib
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

from headrace.bundled import DEFAULT_MODEL
from headrace.cli.config import ENV_PREFIX, NeedsExperimental, ServeConfig, from_raw
from headrace.cli.config_origins import origin_of
from headrace.cli.config_variables import apply_variable, nearest_variable, variables
from headrace.cli.config_yaml import Raw, mapping_of, parse_document, read_text
from headrace.core.errors import ConfigError
from headrace.core.strict_decode import MissingKey, UnknownKey

OTHER_VARIABLES = ("HEADRACE_API_KEY", "HEADRACE_CACHE_DIR", "HEADRACE_KEEP_PACKED", "HEADRACE_STREAM_WATCH", "HEADRACE_EMULATES_DOTS")
"""Variables that are read and are no part of the configuration."""

MOST_FAULTS = 100
"""The search ends after this many faults: a bound on the work, whatever the file holds."""


@dataclass(frozen=True, slots=True)
class ConfigFault:
    """One fault. line: in the file, from 1; None for a fault in a variable, which `error` names."""

    error: ConfigError
    line: int | None

    def message(self, file: Path) -> str:
        """The line to print, which begins with file and line where the fault has one."""
        return str(self.error) if self.line is None else f"{file}:{self.line}: {self.error}"


def faults(file: Path, environment: Mapping[str, str]) -> list[ConfigFault]:
    """All faults of a file and the environment, in the order of the lines.

    Raises: ConfigError for a file that cannot be read or is not YAML; nothing else of it can be checked then.
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
    for fault in _each(raw):
        origin = origin_of(fault.where, environment, ENV_PREFIX)
        if origin is None:
            found.append(ConfigFault(fault, _line(lines, fault.where)))
        elif origin not in {other.error.where for other in found}:
            found.append(ConfigFault(ConfigError(origin, fault.reason, fault.remedy), None))
    return sorted(found, key=lambda fault: (fault.line is None, fault.line))


def _each(raw: Raw) -> Iterator[ConfigError]:
    """The errors in plain data, which is changed in place."""
    seen: set[str] = set()
    for _ in range(MOST_FAULTS):
        try:
            from_raw(copy.deepcopy(raw))
            return
        except ConfigError as error:
            where = error.where
            if where not in seen:
                yield error
            while not _mend(raw, where, error, is_again=where in seen):
                where = _parent(where)
                if not where:
                    return
            seen.add(error.where)


def _mend(raw: Raw, where: str, error: ConfigError, *, is_again: bool) -> bool:
    """Make the value at `where` valid: replace it where one is required, else remove it. Returns False when nothing changed.

    where     the error's place, or a section around it after a smaller change was not enough
    is_again  the same place has failed before, so that another change is needed
    """
    *outer, last = [step for step in re.split(r"[.\[\]]+", where) if step] or [""]
    place: object = raw
    for step in outer:
        place = _child(place, step)
    is_itself = where == error.where  # else it is a section around the faulty value
    if is_itself and not is_again and isinstance(error, MissingKey) and isinstance(place, dict):
        place[last] = _stand_in(last, _parent(where))
        return True
    if isinstance(error, NeedsExperimental):
        raw["experimental"] = True
        return True
    if is_itself and isinstance(error, UnknownKey) and isinstance(place, dict) and last in place:
        del place[last]
        stand_in = _stand_in(error.nearest or "", where)
        if stand_in is not None:  # the key that was meant may be required: it is not missing, too
            place.setdefault(error.nearest, stand_in)
        return True
    return _replace(place, last, _stand_in(last if isinstance(place, dict) else f"{outer[-1]}[]" if outer else "", where))


def _replace(place: object, last: str, stand_in: object) -> bool:
    """Put `stand_in` at `last` of `place`; remove what is there if `stand_in` is None or there already. False when nothing changed."""
    if isinstance(place, dict) and (last in place or last in ("models", "name")):
        if stand_in is None or place.get(last) == stand_in:
            return place.pop(last, None) is not None
        place[last] = stand_in
        return True
    if isinstance(place, list) and last.isdecimal() and int(last) < len(place) and stand_in not in (None, place[int(last)]):
        place[int(last)] = stand_in
        return True
    return False


def _child(place: object, step: str) -> object:
    """What `place`, a mapping or a list, holds under `step`; None when it holds nothing there."""
    if isinstance(place, list) and step.isdecimal() and int(step) < len(place):
        return place[int(step)]
    return place.get(step) if isinstance(place, dict) else None


def _stand_in(name: str, where: str) -> object:
    """A valid value for a key that is required; None for a key that may be left out. `where` makes each name and API key unique."""
    digest = hashlib.sha256(where.encode()).hexdigest()
    unique_name = f"stand-in-{digest[-12:]}"
    model = {"name": unique_name, "engine": {"model": DEFAULT_MODEL}}
    made: dict[str, object] = {
        "models": [model],
        "models[]": model,
        "name": unique_name,
        "model": DEFAULT_MODEL,
        "engine": {"model": DEFAULT_MODEL},
        "upstream": {"url": "http://127.0.0.1/v1", "model": "stand-in"},
        "url": "http://127.0.0.1/v1",
        "key": f"stand-in-{digest}",
        "sha256": digest,
        "api_keys[]": {"sha256": digest},
    }
    return made.get(name, unique_name if name.endswith("[]") else None)


def _line(lines: Mapping[str, int], where: str) -> int:
    """The line of the value at `where`, or of the nearest section around it that the file has."""
    while where and where not in lines:
        where = _parent(where)
    return lines.get(where, 1)


def _parent(where: str) -> str:
    """The path of the section or list that holds the value at `where`; empty for a key at the top."""
    return re.sub(r"((^|\.)[^.\[\]]*|\[\d+\])$", "", where)


def unread_variables(environment: Mapping[str, str]) -> Iterator[str]:
    """A message for each HEADRACE_ variable that is not read, except those that Kubernetes sets for a service named headrace."""
    known = {name for name, _ in variables(environment, ENV_PREFIX)}
    for name, value in sorted(environment.items()):
        if not name.startswith(ENV_PREFIX) or name in known or name in OTHER_VARIABLES or _is_service(name, value):
            continue
        nearest = nearest_variable(ServeConfig, name, ENV_PREFIX)
        yield f"{name} is not read." + (f" Did you mean {nearest}?" if nearest else "")


def _is_service(name: str, value: str) -> bool:
    return re.search(r"_SERVICE_(HOST|PORT)|_PORT_\d+_(TCP|UDP)", name) is not None or value.startswith(("tcp://", "udp://"))
