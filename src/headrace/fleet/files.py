"""The private directory of one deployment and the files its processes are started with.

Sockets and configuration (which holds keys) live in one directory of mode 0700 with a short path: a Unix socket's name has 107 bytes.
"""

from __future__ import annotations

import fcntl
import json
import os
import re
import shutil
import stat
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path

from headrace.core.cpus import allowed_cpus
from headrace.core.errors import ConfigError
from headrace.fleet.config import FleetConfig, ModelSpec

PREFIX = "headrace-"
LOCK = "lock"
MAX_DIR_BYTES = 90
"""Leaves room for the file names inside."""


@dataclass(frozen=True, slots=True)
class ReplicaFiles:
    """One engine process: its name, its model's, where it will listen and the file it reads."""

    name: str
    model: str
    address: str
    config: Path


@contextmanager
def run_dir(parent: Path | None) -> Iterator[Path]:
    """A fresh directory of ours alone, removed at the end. Raises ConfigError when its path is too long or its parent unusable.

    What a killed supervisor left behind in the same place is removed first: its files hold keys.
    """
    base = parent or _default_parent()
    _sweep(base)
    with _written(base):
        path = Path(tempfile.mkdtemp(prefix=PREFIX, dir=base))
    try:
        if len(os.fsencode(path)) > MAX_DIR_BYTES:
            raise ConfigError(
                "run_dir", f"{path} has more than {MAX_DIR_BYTES} bytes", "Sockets need a short path: choose another run_dir."
            )
        with _locked(path):
            yield path
    finally:
        shutil.rmtree(path, ignore_errors=True)


@contextmanager
def _written(path: Path) -> Iterator[None]:
    """Whatever the disk answers becomes a ConfigError: an error in writing does not say by itself what was written."""
    try:
        yield
    except OSError as error:
        raise ConfigError(
            "run_dir", f"{path} cannot be written ({error.strerror})", "Free space there, or choose another run_dir."
        ) from error


@contextmanager
def _locked(folder: Path) -> Iterator[None]:
    """Says that `folder` is in use, for as long as this process lives. It is locked before it gets its name, so never seen unlocked."""
    with ExitStack() as stack:
        with _written(folder):
            file = stack.enter_context(open(folder / "lock.new", "wb"))
            fcntl.flock(file, fcntl.LOCK_EX)
            os.rename(folder / "lock.new", folder / LOCK)
        yield


def _sweep(base: Path) -> None:
    """Remove directories of dead supervisors. One without a lock file is just being made; one of another user is left alone."""
    for lock in base.glob(f"{PREFIX}*/{LOCK}"):
        try:
            _remove_if_unlocked(lock)
        except OSError:
            continue


def _remove_if_unlocked(lock: Path) -> None:
    """In a directory that all users may write, a lock file may be anything: another user's FIFO or link must not block this process."""
    if not stat.S_ISDIR(lock.parent.lstat().st_mode):
        return
    descriptor = os.open(lock, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC)
    try:
        info = os.fstat(descriptor)
        if stat.S_ISREG(info.st_mode) and info.st_uid == lock.parent.lstat().st_uid == os.geteuid():
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
            shutil.rmtree(lock.parent, ignore_errors=True)
    finally:
        os.close(descriptor)


def write_engine_files(config: FleetConfig, folder: Path) -> list[ReplicaFiles]:
    """One file per replica, in the order of the models. Several engines share the machine: each keeps to its CPUs and part of memory."""
    replicas: list[ReplicaFiles] = []
    total = sum(model.replicas for model in config.models)
    cpus = allowed_cpus()
    for model in config.models:
        for index in range(model.replicas):
            number = len(replicas)
            replica = ReplicaFiles(
                name=f"{re.sub(r'[^A-Za-z0-9._-]', '-', model.name)[:100]}-{index}",
                model=model.name,
                address=f"unix:{folder / f'e{number}.sock'}",
                config=folder / f"e{number}.json",
            )
            content = {
                "replica": replica.name,
                "address": replica.address,
                "drain_timeout_s": config.drain_timeout_s,
                # A given number of threads means that the operator has divided the machine by hand.
                "cpus": "" if model.engine.get("num_threads") is not None else ",".join(map(str, share_of(cpus, number, total))),
                "num_neighbours": total - 1,
                "block_key": config.block_key,
                "engine": {**model.engine, "model": str(model.folder)},
            }
            _write(replica.config, content)
            replicas.append(replica)
    return replicas


def share_of(cpus: Sequence[int] | None, number: int, total: int) -> list[int]:
    """The CPUs engine `number` of `total` keeps to: all of them when it is alone, equal parts, or one in turn when there are too few.

    cpus  None where the system does not say which are allowed: engines are bound to none then
    """
    if total == 1 or cpus is None:
        return []
    if total >= len(cpus):
        return [cpus[number % len(cpus)]]
    return list(cpus[number * len(cpus) // total : (number + 1) * len(cpus) // total])


def write_gateway_file(config: FleetConfig, replicas: Sequence[ReplicaFiles], folder: Path) -> Path:
    """The file that all gateways of this machine read: their options, and where each model's replicas listen."""
    path = folder / "gateway.json"
    store = config.gateway.get("store") or {"path": str(folder / "store.db")}
    _write(path, {**gateway_content(config, replicas), "store": store})
    return path


def gateway_content(config: FleetConfig, replicas: Sequence[ReplicaFiles] = ()) -> dict[str, object]:
    """What the gateway reads. replicas: the engines of this machine. Raises ConfigError."""
    models = [_gateway_model(model, replicas) for model in config.models]
    return {**config.gateway, "models": models, "timeouts": _with_drain(config)}


def _gateway_model(model: ModelSpec, replicas: Sequence[ReplicaFiles]) -> dict[str, object]:
    named: dict[str, object] = {"name": model.name, "aliases": list(model.aliases)}
    if model.upstreams:
        named["upstreams"] = [dict(upstream) for upstream in model.upstreams]
    if model.folder is None:
        return named
    listening = [{"name": replica.name, "address": replica.address} for replica in replicas if replica.model == model.name]
    elsewhere = [dict(replica) for replica in model.remote]
    return {**named, **model.gateway, "folder": str(model.folder), "replicas": [*listening, *elsewhere]}


def _with_drain(config: FleetConfig) -> dict[str, object]:
    given = config.gateway.get("timeouts", {})
    if not isinstance(given, Mapping):
        raise ConfigError("gateway.timeouts", "is not a map of names to seconds")
    # Zero would mean no time at all to end a stream orderly; the gateway asks for a positive number.
    return {"drain_s": max(config.drain_timeout_s, 0.1), **given}


def _write(path: Path, content: Mapping[str, object]) -> None:
    """Whole or not at all: a process that is being started again may be reading it."""
    new = path.with_suffix(".new")
    with _written(path):
        new.touch(mode=0o600)
        new.write_text(json.dumps(content, indent=1), encoding="utf-8")
        new.replace(path)


def _default_parent() -> Path:
    """XDG_RUNTIME_DIR when it is as the standard requires (owned by this user, closed to all other users), else the temporary directory."""
    given = os.environ.get("XDG_RUNTIME_DIR")
    if given and os.path.isdir(given):
        info = os.stat(given)
        if info.st_uid == os.geteuid() and not stat.S_IMODE(info.st_mode) & 0o077 and len(os.fsencode(given)) < MAX_DIR_BYTES - 20:
            return Path(given)
    return Path(tempfile.gettempdir())
