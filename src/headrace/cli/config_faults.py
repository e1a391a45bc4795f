"""Every fault of a configuration at once, each with its line in the file.

Checks stop at the first fault they meet. So one is noted, the value it is about is taken out or replaced by one that holds, and the checks
run again, until nothing is left to say. Nothing of the mended configuration is kept.
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
from headrace.cli.config_decode import apply_variable, nearest_variable, variables
from headrace.cli.config_origins import origin_of
from headrace.cli.config_yaml import Raw, mapping_of, parse_document, read_text
from headrace.core.errors import ConfigError
from headrace.core.strict_decode import MissingKey, UnknownKey

OTHER_VARIABLES = ("HEADRACE_API_KEY", "HEADRACE_CACHE_DIR", "HEADRACE_KEEP_PACKED", "HEADRACE_STREAM_WATCH", "HEADRACE_EMULATES_DOTS")
"""What is read and is no configuration."""

MOST_FAULTS = 100


@dataclass(frozen=True, slots=True)
class ConfigFault:
    """line: in the file, from 1; None when it is not in the file but in a variable, which `error` names."""

    error: ConfigError
    line: int | None

    def words(self, file: Path) -> str:
        return str(self.error) if self.line is None else f"{file}:{self.line}: {self.error}"


def faults(file: Path, environment: Mapping[str, str]) -> list[ConfigFault]:
    """Of a file and the environment.

    Raises: ConfigError for a file that cannot be read or is no YAML, where the first fault hides the rest.
    """
    document = parse_document(read_text(file), str(file))
    raw, lines = mapping_of(document.value, file), document.lines
    found = [
        ConfigFault(ConfigError(each.path, f"is given twice, first on line {each.first_line}", "Leave one of them out."), each.line)
        for each in document.repeated
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
    """The errors of plain data, which is mended in place."""
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
                where = _around(where)
                if not where:
                    return
            seen.add(error.where)


def _mend(raw: Raw, where: str, error: ConfigError, *, is_again: bool) -> bool:
    """Make the value at `where` hold: by one in its place where one is wanted, else by taking it out. False when nothing changed."""
    *outer, last = [step for step in re.split(r"[.\[\]]+", where) if step] or [""]
    place: object = raw
    for step in outer:
        place = _inside(place, step)
    is_itself = where == error.where  # else it is a section around the faulty value
    if is_itself and not is_again and isinstance(error, MissingKey) and isinstance(place, dict):
        place[last] = _stand_in(last, _around(where))
        return True
    if isinstance(error, NeedsExperimental):
        raw["experimental"] = True
        return True
    nearest = error.nearest if is_itself and isinstance(error, UnknownKey) else None
    if nearest is not None and isinstance(place, dict) and last in place and nearest not in place:
        place[nearest] = place.pop(last)  # so that its value is checked too
        return True
    return _replace(place, last, _stand_in(last if isinstance(place, dict) else f"{outer[-1]}[]" if outer else "", where))


def _replace(place: object, last: str, stand_in: object) -> bool:
    """Put `stand_in` there, or take out what is there where it may be left out (None) or was put there before. False: nothing changed."""
    if isinstance(place, dict) and (last in place or last in ("models", "name")):
        if stand_in is None or place.get(last) == stand_in:
            return place.pop(last, None) is not None
        place[last] = stand_in
        return True
    if isinstance(place, list) and last.isdecimal() and int(last) < len(place) and stand_in not in (None, place[int(last)]):
        place[int(last)] = stand_in
        return True
    return False


def _inside(place: object, step: str) -> object:
    if isinstance(place, list) and step.isdecimal() and int(step) < len(place):
        return place[int(step)]
    return place.get(step) if isinstance(place, dict) else None


def _stand_in(name: str, where: str) -> object:
    """A value that holds where one must be; None where the key may be left out. `where` makes names and keys of it differ."""
    digest = hashlib.sha256(where.encode()).hexdigest()
    name_of_its_own = f"stand-in-{digest[-12:]}"
    model = {"name": name_of_its_own, "engine": {"model": DEFAULT_MODEL}}
    made: dict[str, object] = {
        "models": [model],
        "models[]": model,
        "name": name_of_its_own,
        "model": DEFAULT_MODEL,
        "engine": {"model": DEFAULT_MODEL},
        "upstream": {"url": "http://127.0.0.1/v1", "model": "stand-in"},
        "url": "http://127.0.0.1/v1",
        "key": f"stand-in-{digest}",
        "sha256": digest,
        "api_keys[]": {"sha256": digest},
    }
    return made.get(name, name_of_its_own if name.endswith("[]") else None)


def _line(lines: Mapping[str, int], where: str) -> int:
    """Of the value, or of the nearest section around it that is written."""
    while where and where not in lines:
        where = _around(where)
    return lines.get(where, 1)


def _around(where: str) -> str:
    """The path of what holds the value at `where`; empty for a key at the top."""
    return re.sub(r"((^|\.)[^.\[\]]*|\[\d+\])$", "", where)


def unread_variables(environment: Mapping[str, str]) -> Iterator[str]:
    """A line for each variable that looks like ours and is not read. What Kubernetes sets for a service named headrace is left alone."""
    known = {name for name, _ in variables(environment, ENV_PREFIX)}
    for name, value in sorted(environment.items()):
        if not name.startswith(ENV_PREFIX) or name in known or name in OTHER_VARIABLES or _is_service(name, value):
            continue
        nearest = nearest_variable(ServeConfig, name, ENV_PREFIX)
        yield f"{name} is not read." + (f" Did you mean {nearest}?" if nearest else "")


def _is_service(name: str, value: str) -> bool:
    return re.search(r"_SERVICE_(HOST|PORT)|_PORT_\d+_(TCP|UDP)", name) is not None or value.startswith(("tcp://", "udp://"))
