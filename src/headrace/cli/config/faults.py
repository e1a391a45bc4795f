"""Finds every fault of a configuration at once, each with its line in the file, or the variable that set the value.

Checks stop at the first error, so its value is made valid in a copy, and they run again. A mended value must not hide other faults: a
misspelt key is renamed with all that it holds, and of two sections that exclude each other the second moves into an item of its own.
"""

from __future__ import annotations

import copy
import hashlib
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

from headrace.bundled import DEFAULT_MODEL
from headrace.cli.config.load import ENV_PREFIX, apply_variable, from_raw, nearest_variable, origin_of, rest_within, variables
from headrace.cli.config.yaml_files import Raw, mapping_of, parse_document, read_text
from headrace.core.errors import ConfigError
from headrace.core.strict_decode import MissingKey, NeedsExactlyOne, UnknownKey, joined
from headrace.engine.config import FindGpus
from headrace.machine.gpus import find_gpus

MOST_FAULTS = 100
"""Bounds the work of the search for any file."""


def each_error(raw: Raw, find: FindGpus) -> Iterator[ConfigError]:
    """One error per place, each with its path in the file. `raw` is changed in place."""
    mending = _Mending(raw)
    written, changed = set(), set()
    for _ in range(MOST_FAULTS):
        try:
            from_raw(copy.deepcopy(raw), find=find)
            return
        except ConfigError as error:
            where = mending.as_written(error.where)
            if where not in written:
                yield error.at(where)
            if not mending.mend(error, is_again=error.where in changed):
                return
            written.add(where)
            changed.add(error.where)


class _Mending:
    """Plain data that is made valid step by step.

    moved  path of a moved value in the mended data -> its path in the file
    """

    def __init__(self, raw: Raw) -> None:
        self.raw = raw
        self.moved: dict[str, str] = {}

    def as_written(self, where: str) -> str:
        for path in sorted(self.moved, key=len, reverse=True):
            if (rest := rest_within(where, path)) is not None:
                return self.moved[path] + rest
        return where

    def mend(self, error: ConfigError, *, is_again: bool) -> bool:
        """False: nothing changed. is_again: the same place failed before, so that the change for the error's class was not enough"""
        if not is_again and self._mend_class(error):
            return True
        where = error.where
        while where:
            if self._replace(where):
                return True
            where = parent(where)
        return False

    def _mend_class(self, error: ConfigError) -> bool:
        *outer, last = _steps(error.where) or [""]
        place = self._at(outer)
        match error, place:
            case MissingKey(), dict():
                place[last] = _stand_in(last, parent(error.where))
            case UnknownKey(), dict() if last in place:
                self._rename(place, error)
            case NeedsExactlyOne(), list():
                self._leave_one(place, error)
            case _:
                return False
        return True

    def _rename(self, section: dict[str, object], error: UnknownKey) -> None:
        around, _, unknown = error.where.rpartition(".")
        value = section.pop(unknown)
        if error.nearest is not None and error.nearest not in section:
            section[error.nearest] = value
            self.moved[joined(around, error.nearest)] = self.as_written(error.where)

    def _leave_one(self, items: list[object], error: NeedsExactlyOne) -> None:
        """Leave in an item only the first of two keys that exclude each other. The second moves to a new item at the end of the list."""
        first, second = error.keys
        around, number = parent(error.where), len(items)
        item = self._at(_steps(error.where))
        assert isinstance(item, dict)  # it was decoded
        if not item.get(second):
            item[first] = _stand_in(first, error.where)
        elif item.get(first):
            items.append({second: item.pop(second)} | ({"name": _stand_in("name", error.where)} if around == "models" else {}))
            self.moved[f"{around}[{number}].{second}"] = self.as_written(f"{error.where}.{second}")

    def _replace(self, where: str) -> bool:
        """Put a stand-in at `where`, or remove the value if none is needed or it is there already. False: nothing changed."""
        *outer, last = _steps(where)
        place = self._at(outer)
        stand_in = _stand_in(last if isinstance(place, dict) else f"{outer[-1]}[]" if outer else "", where)
        if isinstance(place, dict) and (last in place or last in ("models", "name")):
            if stand_in is None or place.get(last) == stand_in:
                return place.pop(last, None) is not None
            place[last] = stand_in
            return True
        if isinstance(place, list) and last.isdecimal() and int(last) < len(place) and stand_in not in (None, place[int(last)]):
            place[int(last)] = stand_in
            return True
        return False

    def _at(self, steps: list[str]) -> object:
        place: object = self.raw
        for step in steps:
            if isinstance(place, list):
                place = place[int(step)] if step.isdecimal() and int(step) < len(place) else None
            else:
                place = place.get(step) if isinstance(place, dict) else None
        return place


def parent(where: str) -> str:
    """The path of the section or list around `where`; empty for a key at the top."""
    return re.sub(r"((^|\.)[^.\[\]]*|\[\d+\])$", "", where)


def _steps(where: str) -> list[str]:
    return [step for step in re.split(r"[.\[\]]+", where) if step]


def _stand_in(name: str, where: str) -> object:
    """A valid value for a required key; None for an optional one. Names and API keys get `where` into their value, to be unique."""
    digest = hashlib.sha256(where.encode()).hexdigest()
    unique_name = f"stand-in-{digest[-12:]}"
    model = {"name": unique_name, "engine": {"model": DEFAULT_MODEL}}
    made: dict[str, object] = {
        "models": [model],
        "models[]": model,
        "name": unique_name,
        "model": DEFAULT_MODEL,
        "engine": {"model": DEFAULT_MODEL},
        "upstreams": [{"url": "http://127.0.0.1/v1", "model": "stand-in"}],
        "upstreams[]": {"url": "http://127.0.0.1/v1", "model": "stand-in", "name": unique_name},
        "remote": {"model": DEFAULT_MODEL, "replicas": [{"name": unique_name, "address": "unix:/run/stand-in"}]},
        "replicas[]": {"name": unique_name, "address": "unix:/run/stand-in"},
        "address": "unix:/run/stand-in",
        "ca": "stand-in",
        "certificate": "stand-in",
        "url": "http://127.0.0.1/v1",
        "key": f"stand-in-{digest}",
        "sha256": digest,
        "api_keys[]": {"sha256": digest},
    }
    if name == "replicas" and ".remote" in where:
        return [made["replicas[]"]]
    return made.get(name, unique_name if name.endswith("[]") else None)


OTHER_VARIABLES = ("HEADRACE_API_KEY", "HEADRACE_CACHE_DIR", "HEADRACE_KEEP_PACKED", "HEADRACE_STREAM_WATCH")
"""Variables that are read, but are not part of the configuration."""


@dataclass(frozen=True, slots=True)
class ConfigFault:
    """line: in the file, from 1; None for a fault of a variable, which `error` names"""

    error: ConfigError
    line: int | None

    def message(self, file: Path) -> str:
        return str(self.error) if self.line is None else f"{file}:{self.line}: {self.error}"


def faults(file: Path, environment: Mapping[str, str], find: FindGpus = find_gpus) -> list[ConfigFault]:
    """All faults, in the order of their lines. Raises ConfigError if the file cannot be read or is not YAML."""
    document = parse_document(read_text(file), str(file))
    raw, lines = mapping_of(document.value, file), document.lines
    all_faults = [
        ConfigFault(ConfigError(path, f"is given twice, first on line {first_line}", "Leave one of them out."), line)
        for path, line, first_line in document.repeated
    ]
    for name, steps in variables(environment):
        try:
            apply_variable(raw, name, steps, environment[name])
        except ConfigError as error:
            all_faults.append(ConfigFault(error, None))
    for fault in each_error(raw, find):
        origin = origin_of(fault.where, environment)
        if origin is None:
            all_faults.append(ConfigFault(fault, _line(lines, fault.where)))
        elif origin not in {other.error.where for other in all_faults}:
            all_faults.append(ConfigFault(ConfigError(origin, fault.reason, fault.remedy), None))
    return sorted(all_faults, key=lambda fault: (fault.line is None, fault.line))


def _line(lines: Mapping[str, int], where: str) -> int:
    while where and where not in lines:
        where = parent(where)
    return lines.get(where, 1)


def unread_variables(environment: Mapping[str, str]) -> Iterator[str]:
    """A message for each HEADRACE_ variable that nothing reads, except those that Kubernetes sets for a service named headrace."""
    known = {name for name, _ in variables(environment)}
    for name, value in sorted(environment.items()):
        if not name.startswith(ENV_PREFIX) or name in known or name in OTHER_VARIABLES or _is_service(name, value):
            continue
        nearest = nearest_variable(name)
        yield f"{name} is not read." + (f" Did you mean {nearest}?" if nearest else "")


def _is_service(name: str, value: str) -> bool:
    return re.search(r"_SERVICE_(HOST|PORT)|_PORT_\d+_(TCP|UDP)", name) is not None or value.startswith(("tcp://", "udp://"))
