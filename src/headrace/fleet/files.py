"""Makes the private directory of one deployment, and writes the files that its processes are started with.

Sockets and configuration (which holds keys) live in one directory of mode 0700, whose path is short.
"""

from __future__ import annotations

import json
import os
import stat
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path

from headrace.core.adapters import AdapterSource
from headrace.core.errors import ConfigError
from headrace.core.hashing import BLOCKS, SALTS, site_secret
from headrace.core.strict_decode import plain, read_json_object
from headrace.fleet.config import FleetConfig, ModelSpec
from headrace.machine.gpus import deal_gpu, find_gpus
from headrace.machine.locked_folders import LockedFolder, is_locked, remove_unlocked
from headrace.machine.private_files import MAX_DIR_BYTES
from headrace.machine.resources import MachineShare, allowed_cpus, share_of

PREFIX = "headrace-"
LOCK = "lock"
GATEWAY_FILE = "gateway.json"


@dataclass(frozen=True, slots=True)
class ReplicaFiles:
    """configs    of each of its ranks
    listening  where gateways reach it and with what, as keys of their file; empty: it has no place yet
    """

    name: str
    model: str
    configs: Sequence[Path]
    listening: Mapping[str, str] = field(default_factory=dict, repr=False)

    @property
    def config(self) -> Path:
        return self.configs[0]

    def remove(self) -> None:
        for path in (*self.configs, *map(self.config.with_suffix, (".sock", ".ranks"))):
            path.unlink(missing_ok=True)


def rank_label(name: str, rank: int) -> str:
    return f"{name}.r{rank}" if rank else name


def rendezvous_of(config: Path) -> str:
    """Where the ranks of a replica meet. config: the file of the first one"""
    return f"unix:{config.with_suffix('.ranks')}"


@contextmanager
def run_dir(parent: Path | None) -> Iterator[Path]:
    """Raises ConfigError.

    Directories that killed supervisors left are removed: their files hold keys.
    """
    base = parent or _default_parent()
    remove_unlocked(base, PREFIX, LOCK)
    with _written(base):
        folder = LockedFolder.make(base, PREFIX, LOCK)
    try:
        if len(os.fsencode(folder.path)) > MAX_DIR_BYTES:
            raise ConfigError(
                "run_dir", f"{folder.path} has more than {MAX_DIR_BYTES} bytes", "Sockets need a short path: choose another run_dir."
            )
        yield folder.path
    finally:
        folder.remove()


@contextmanager
def _written(path: Path) -> Iterator[None]:
    try:
        yield
    except OSError as error:
        raise ConfigError(
            "run_dir", f"{path} cannot be written ({error.strerror})", "Free space there, or choose another run_dir."
        ) from error


def running_deployments(parent: Path | None) -> list[Path]:
    """parent: None: this user's deployments in the default place"""
    may_be_another_users = parent is not None and os.geteuid() == 0
    locks = sorted((parent or _default_parent()).glob(f"{PREFIX}*/{LOCK}"))
    return [lock.parent for lock in locks if is_running(lock.parent) and (may_be_another_users or _owner(lock.parent) == os.geteuid())]


def is_running(folder: Path) -> bool:
    return is_locked(folder, LOCK)


def _owner(folder: Path) -> int:
    return folder.stat().st_uid


def write_engine_files(
    config: FleetConfig,
    model: ModelSpec,
    folder: Path,
    *,
    name: str,
    number: int,
    share: MachineShare | None,
    adapters: Sequence[AdapterSource] = (),
) -> ReplicaFiles:
    """
    number  never used twice in one folder, since an old socket may still be in use
    share   of this machine; None: it runs on another one, which adds what depends on the place (`fleet.ray.agent`)
    """
    world = model.num_ranks
    configs = [folder / f"{rank_label(f'e{number}', rank)}.json" for rank in range(world)]
    listening = {} if share is None else {"address": f"unix:{folder / f'e{number}.sock'}"}
    replica = ReplicaFiles(name, model.name, configs, listening)
    engine = {**config.engine_options(model), "model": str(model.folder)}
    content = {"replica": replica.name, **listening, "drain_timeout_s": config.drain_timeout_s, "engine": engine}
    for rank, path in enumerate(configs):
        of_group = {"rank": rank} if world > 1 else {}
        key = {} if rank else {"block_key": site_secret(config.site_key, BLOCKS)}  # the other ranks hash no blocks
        here = {} if share is None else _placed_here(model, share, rank, replica)
        _write(path, {**content, **key, **of_group, **here})
    if adapters:
        write_adapters(replica.config, adapters)
    return replica


def write_adapters(path: Path, adapters: Sequence[AdapterSource]) -> None:
    """Into the file of an engine's rank 0, which names adapters to the others; nothing else in it changes. Raises ConfigError."""
    content = read_json_object(path)
    engine = content["engine"]
    assert isinstance(engine, dict), "this program writes it"
    _write(path, {**content, "engine": {**engine, "lora_modules": plain(adapters)}})


def _placed_here(model: ModelSpec, share: MachineShare, rank: int, replica: ReplicaFiles) -> dict[str, object]:
    world = model.num_ranks
    meeting = {"rendezvous": rendezvous_of(replica.config)} if world > 1 else {}
    return {**meeting, **_machine_share(model, MachineShare(share.index * world + rank, share.total * world))}


def _machine_share(model: ModelSpec, share: MachineShare) -> dict[str, object]:
    # A given number of threads means that the operator has divided the machine by hand.
    cpus = "" if model.engine.get("num_threads") is not None else ",".join(map(str, share_of(allowed_cpus(), share)))
    names = find_gpus().names if model.engine.get("device") == "cuda" else ()
    if not names:
        return {"cpus": cpus, "num_neighbours": share.total - 1}
    gpu, num_neighbours = deal_gpu(names, share.index, share.total)
    return {"cpus": cpus, "gpu": gpu, "num_neighbours": num_neighbours}


def write_gateway_file(content: Mapping[str, object], folder: Path) -> Path:
    path = folder / GATEWAY_FILE
    _write(path, content)
    return path


def gateway_content(
    config: FleetConfig,
    replicas: Sequence[ReplicaFiles] = (),
    more: Mapping[str, Mapping[str, object]] | None = None,
) -> dict[str, object]:
    """Raises ConfigError.

    more  model -> further keys of its entry
    """
    models = [{**_gateway_model(model, replicas), **(more or {}).get(model.name, {})} for model in config.models]
    salt_key = site_secret(config.site_key, SALTS)
    return {**config.gateway, "models": models, "timeouts": _with_drain(config), "salt_key": salt_key}


def _gateway_model(model: ModelSpec, replicas: Sequence[ReplicaFiles]) -> dict[str, object]:
    named: dict[str, object] = {"name": model.name, "aliases": list(model.aliases), **model.gateway}
    if model.upstreams:
        named["upstreams"] = [dict(upstream) for upstream in model.upstreams]
    if model.folder is None:
        return named
    listening = [{"name": replica.name, **replica.listening} for replica in replicas if replica.model == model.name]
    elsewhere = [dict(replica) for replica in model.remote]
    made = {**named, "folder": str(model.folder), "replicas": [*listening, *elsewhere]}
    on_demand = {"starts_on_demand": True} if model.starts_on_demand else {}
    return {**made, **on_demand}


def _with_drain(config: FleetConfig) -> dict[str, object]:
    given = config.gateway.get("timeouts", {})
    if not isinstance(given, Mapping):
        raise ConfigError("gateway.timeouts", "is not a map of names to seconds")
    # Zero would mean no time at all to end a stream orderly; the gateway asks for a positive number.
    return {"drain_s": max(config.drain_timeout_s, 0.1), **given}


def _write(path: Path, content: Mapping[str, object]) -> None:
    with _written(path):
        write_process_file(path, content)


def write_process_file(path: Path, content: Mapping[str, object]) -> None:
    """Whole or not at all: a process that is being started again may be reading the file. Raises OSError."""
    new = path.with_suffix(".new")
    new.touch(mode=0o600)
    new.write_text(json.dumps(content, indent=1), encoding="utf-8")
    new.replace(path)


def _default_parent() -> Path:
    """XDG_RUNTIME_DIR if it is this user's and closed to all others."""
    given = os.environ.get("XDG_RUNTIME_DIR")
    if given and os.path.isdir(given):
        info = os.stat(given)
        if info.st_uid == os.geteuid() and not stat.S_IMODE(info.st_mode) & 0o077 and len(os.fsencode(given)) < MAX_DIR_BYTES - 20:
            return Path(given)
    with _written(Path("the temporary directory")):  # there may be none that can be written
        return Path(tempfile.gettempdir())
