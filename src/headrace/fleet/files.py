"""The private directory of one deployment and the files its processes are started with.

Sockets and configuration (which holds keys) live in one directory of mode 0700 with a short path: a Unix socket's name has 107 bytes.
"""

from __future__ import annotations

import fcntl
import json
import os
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
GATEWAY_FILE = "gateway.json"
MAX_DIR_BYTES = 90
"""Leaves room for the file names inside."""


@dataclass(frozen=True, slots=True)
class ReplicaFiles:
    """One engine process: its name, its model's, where it will listen and the file it reads."""

    name: str
    model: str
    address: str
    config: Path

    @property
    def socket(self) -> Path:
        return Path(self.address.removeprefix("unix:"))


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


def running_deployments(parent: Path | None) -> list[Path]:
    """Folders of deployments that run now. parent: as for `run_dir`; None: of this user's, where they are by themselves"""
    may_be_another_users = parent is not None and os.geteuid() == 0
    locks = sorted((parent or _default_parent()).glob(f"{PREFIX}*/{LOCK}"))
    return [lock.parent for lock in locks if is_running(lock.parent) and (may_be_another_users or _owner(lock.parent) == os.geteuid())]


def is_running(folder: Path) -> bool:
    """A supervisor has its files in `folder` now. Folders are private: another user's is seen by the superuser alone."""
    try:
        descriptor = os.open(folder / LOCK, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC)
    except OSError:
        return False
    try:
        info = os.fstat(descriptor)
        if not stat.S_ISREG(info.st_mode) or info.st_uid != _owner(folder):
            return False
        fcntl.flock(descriptor, fcntl.LOCK_SH | fcntl.LOCK_NB)
    except BlockingIOError:
        return True
    except OSError:
        return False
    finally:
        os.close(descriptor)
    return False


def _owner(folder: Path) -> int:
    return folder.stat().st_uid


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


@dataclass(frozen=True, slots=True)
class MachineShare:
    """The part of this machine that one engine keeps to: CPUs and memory, part `index` of `total` equal ones."""

    index: int
    total: int


def write_engine_file(config: FleetConfig, model: ModelSpec, folder: Path, *, name: str, number: int, share: MachineShare) -> ReplicaFiles:
    """The file that one engine process reads.

    name    of the replica
    number  in the names of its files; never the same twice in one folder, since a socket's name may still be in use
    """
    replica = ReplicaFiles(name, model.name, f"unix:{folder / f'e{number}.sock'}", folder / f"e{number}.json")
    content = {
        "replica": replica.name,
        "address": replica.address,
        "drain_timeout_s": config.drain_timeout_s,
        # A given number of threads means that the operator has divided the machine by hand.
        "cpus": "" if model.engine.get("num_threads") is not None else ",".join(map(str, share_of(allowed_cpus(), share))),
        "num_neighbours": share.total - 1,
        "block_key": config.block_key,
        "engine": {**model.engine, "model": str(model.folder)},
    }
    _write(replica.config, content)
    return replica


def share_of(cpus: Sequence[int] | None, share: MachineShare) -> list[int]:
    """The CPUs of a share: all of them when it is the only one, equal parts, or one in turn when there are too few.

    cpus  None where the system does not say which are allowed: engines are bound to none then
    """
    number, total = share.index, share.total
    if total == 1 or cpus is None:
        return []
    if total >= len(cpus):
        return [cpus[number % len(cpus)]]
    return list(cpus[number * len(cpus) // total : (number + 1) * len(cpus) // total])


def write_gateway_file(content: Mapping[str, object], folder: Path) -> Path:
    """The file that all gateways of this machine read. content: see `gateway_content`"""
    path = folder / GATEWAY_FILE
    _write(path, content)
    return path


def gateway_content(
    config: FleetConfig, replicas: Sequence[ReplicaFiles] = (), unavailable: Mapping[str, str] | None = None
) -> dict[str, object]:
    """What the gateway reads: its options, and where each model's replicas listen. Raises ConfigError.

    replicas     the engines of this machine
    unavailable  model that has none of them now -> why, in words that clients may read
    """
    models = [_gateway_model(model, replicas, (unavailable or {}).get(model.name, "")) for model in config.models]
    return {**config.gateway, "models": models, "timeouts": _with_drain(config)}


def _gateway_model(model: ModelSpec, replicas: Sequence[ReplicaFiles], unavailable: str) -> dict[str, object]:
    named: dict[str, object] = {"name": model.name, "aliases": list(model.aliases), **model.gateway}
    if model.upstreams:
        named["upstreams"] = [dict(upstream) for upstream in model.upstreams]
    if model.folder is None:
        return named
    listening = [{"name": replica.name, "address": replica.address} for replica in replicas if replica.model == model.name]
    elsewhere = [dict(replica) for replica in model.remote]
    made = {**named, "folder": str(model.folder), "replicas": [*listening, *elsewhere]}
    return {**made, "unavailable": unavailable} if unavailable else made


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
