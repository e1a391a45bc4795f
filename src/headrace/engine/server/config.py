"""The file an engine process is started with: JSON, written by the supervisor, decoded once and refused by name.

{"replica": "demo-0", "address": "unix:/run/user/1000/headrace-x/e0.sock", "engine": {"model": "/models/demo", "max_num_seqs": 32}}
"""

from __future__ import annotations

import json
import os
import types
from collections.abc import Mapping
from dataclasses import MISSING, dataclass, field, fields, replace
from difflib import get_close_matches
from pathlib import Path
from typing import TypeVar, Union, get_args, get_origin, get_type_hints

from headrace.core.errors import ConfigError
from headrace.core.hashing import check_secret
from headrace.engine.config import EngineConfig

Value = TypeVar("Value")


@dataclass(frozen=True, slots=True, kw_only=True)
class ProcessConfig:
    """What an engine process needs beside its engine.

    replica          its name in logs, hellos and metrics
    address          where it listens: "unix:/path", or loopback "host:port" with a token
    token            what gateways must send; None on Unix sockets, whose directory is the lock
    drain_timeout_s  after SIGTERM: how long running requests may take
    cpus             CPUs this engine keeps to, "0,1"; empty = all it may use
    num_neighbours   other engines on this machine: each takes an equal part of its memory
    block_key        secret (hex) that keys block hashes, shared by all engines of a site; empty: drawn by this process
    """

    replica: str
    address: str
    token: str | None = None
    drain_timeout_s: float = 30.0
    cpus: str = ""
    num_neighbours: int = 0
    block_key: str = field(default="", repr=False)

    def keep_to_share(self, engine: EngineConfig) -> EngineConfig:
        """Bind this process to its CPUs, and reduce the engine's memory share. Before anything counts CPUs or starts threads."""
        if self.cpus:  # empty where a process cannot be bound
            os.sched_setaffinity(0, {int(cpu) for cpu in self.cpus.split(",")})
        return replace(engine, memory_fraction=engine.memory_fraction / (1 + self.num_neighbours))


def load_process_config(path: str | Path) -> tuple[ProcessConfig, EngineConfig]:
    """Raises ConfigError naming the file or the key."""
    data = load_json(path)
    engine = decode(EngineConfig, section(data, "engine"), "engine").checked()
    process = decode(ProcessConfig, data, "")
    check_secret("block_key", process.block_key)
    return process, engine


def load_json(path: str | Path) -> dict[str, object]:
    """The object in a JSON file. Raises ConfigError."""
    try:
        data = json.loads(Path(path).read_bytes())
    except (OSError, ValueError, RecursionError) as error:
        raise ConfigError(str(path), f"cannot be read as JSON: {error}") from None
    if not isinstance(data, dict):
        raise ConfigError(str(path), "is not a JSON object")
    return data


def section(data: dict[str, object], key: str) -> Mapping[str, object]:
    """Takes a nested object out of `data`. Raises ConfigError when it is missing or something else."""
    value = data.pop(key, None)
    if not isinstance(value, dict):
        raise ConfigError(key, "is missing" if value is None else "is not an object")
    return value


def decode(cls: type[Value], data: Mapping[str, object], where: str) -> Value:
    """`data` as a frozen dataclass of plain fields. Raises ConfigError for unknown, missing or wrongly typed keys."""
    hints = get_type_hints(cls)
    known = {item.name: item for item in fields(cls)}  # type: ignore[arg-type]
    for key, value in data.items():
        path = f"{where}.{key}" if where else key
        if key not in known:
            close = get_close_matches(key, known, n=1)
            raise ConfigError(path, "is not a known key", f"Did you mean {close[0]}?" if close else f"Known: {', '.join(known)}.")
        if not _fits(value, hints[key]):
            raise ConfigError(path, f"{value!r} is not of type {_type_name(hints[key])}")
    for name, item in known.items():
        if item.default is MISSING and item.default_factory is MISSING and name not in data:
            raise ConfigError(f"{where}.{name}" if where else name, "is missing")
    return cls(**data)


def _fits(value: object, hint: object) -> bool:
    if get_origin(hint) in (Union, types.UnionType):
        return any(_fits(value, choice) for choice in get_args(hint))
    if get_origin(hint) is dict:
        key_hint, value_hint = get_args(hint)
        return isinstance(value, dict) and all(_fits(k, key_hint) and _fits(v, value_hint) for k, v in value.items())
    if hint is float:
        return isinstance(value, int | float) and not isinstance(value, bool)
    if hint is int:
        return isinstance(value, int) and not isinstance(value, bool)
    return isinstance(hint, type) and isinstance(value, hint)


def _type_name(hint: object) -> str:
    return hint.__name__ if isinstance(hint, type) else str(hint)
