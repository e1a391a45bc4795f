"""Decodes what an engine process is started with: JSON of the supervisor, or an operator's file or flags.

{"replica": "demo-0", "address": "unix:/run/user/1000/headrace-x/e0.sock", "engine": {"model": "/models/demo", "max_num_seqs": 32}}
"""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path

from headrace.core.errors import ConfigError
from headrace.core.hashing import BLOCKS, check_secret, site_secret
from headrace.core.option import Role, check_options, option, required
from headrace.core.parallelism import AUTO, Parallelism
from headrace.core.strict_decode import decode, read_json_object
from headrace.engine.config import EngineConfig, FindGpus
from headrace.machine.gpus import VISIBLE, find_gpus
from headrace.machine.hosts import HOST_NAME
from headrace.wire.target import GrpcTarget, check_target, parse_target, target_of
from headrace.wire.tls.files import TlsRole, load_certificates


@dataclass(frozen=True, slots=True, kw_only=True)
class ProcessConfig:
    """The options of an engine process beside those of its engine.

    gpu        as in CUDA_VISIBLE_DEVICES; empty = the first that torch finds
    block_key  secret (hex) of block hashes, derived from `site_key`; a supervisor passes only this one
    """

    replica: str = required("The replica's name in logs and metrics; the flag's default is the model folder's name.")
    address: str = required(
        "Address to listen on: `HOST:PORT` with a token, beyond loopback with `tls_dir` too; or `unix:/path` in a directory of mode 0700.",
    )
    token: str | None = field(default=None, repr=False)
    token_file: str = option("", "File with the token that gateways must send, closed to other users.", shown="`token` of `tls_dir`")
    tls_dir: str = option("", "Folder with this machine's certificates, as for `remote`.")
    drain_timeout_s: float = option(30.0, "Seconds that running streams may take after SIGTERM.", low=0.0)
    cpus: str = option("", "CPUs that the engine keeps to, `0,1,2`.", shown="all")
    gpu: str = ""
    rank: int = option(0, "Which of its replica's processes this is ([ranks.md](ranks.md)): 0 is the one that gateways reach.", low=0)
    rendezvous: str = option(
        "",
        "Where the processes of a replica meet: `unix:/path` in a directory of mode 0700; or, for stages on several machines, `HOST:PORT` "
        "of rank 0, with token and `tls_dir` as for `address`.",
        shown="`address` and `.ranks`",
    )
    tls_name: str = option(
        "",
        "Name that the certificates of the other ranks are for, where all show one: of a Kubernetes Service, say.",
        shown="each rank's host",
    )
    num_neighbours: int = option(0, "Other engines on this machine, or on its GPU: each takes an equal part of its memory.", low=0)
    site_key: str = option(
        "", "Hex secret of the site, as in the file of its gateways.", shown="drawn at start", role=Role.SECURITY, repr=False
    )
    block_key: str = field(default="", repr=False)

    def target(self) -> GrpcTarget:
        """With the token read and the certificates tried. Raises ConfigError."""
        target = target_of(self.address, token=self.token, token_file=self.token_file, tls_dir=self.own_tls_dir)
        if target.tls is not None:
            load_certificates(target.tls, TlsRole.ENGINE)
        return target

    @property
    def own_tls_dir(self) -> str:
        """For `address`: it may be a Unix socket where ranks meet over TLS."""
        return "" if self.address.startswith("unix:") and self.meets_over_tcp else self.tls_dir

    @property
    def meets_over_tcp(self) -> bool:
        return bool(self.rendezvous) and not self.rendezvous.startswith("unix:")

    def check_rendezvous(self, parallelism: Parallelism) -> None:
        """Opens no file. Raises ConfigError."""
        if not self.meets_over_tcp:
            self._ranks_path()
            return
        if parallelism.pp == 1:
            reason = f"{self.rendezvous!r} is for stages on several machines, and the ranks of one stage share the memory of one"
            raise ConfigError("rendezvous", reason, "Set pipeline_parallel_size to the number of machines, or write unix:/path.")
        with _named("rendezvous"):
            check_target(self.rendezvous, token=self.token, token_file=self.token_file, tls_dir=self.tls_dir)
        if self.rendezvous.rpartition(":")[2] == "0":
            raise ConfigError("rendezvous", f"{self.rendezvous!r} names no port by which the others find rank 0", "Choose a port.")
        place = parallelism.place(self.rank)
        if place.tp_rank == 0 and not place.is_first and not place.is_last and self.address.startswith("unix:"):
            reason = f"{self.address} cannot be reached from another machine, and rank {self.rank} takes what the stage before it sends"
            raise ConfigError("address", reason, "Write HOST:PORT of this machine.")

    def ranks_target(self) -> Path | GrpcTarget:
        """Where the ranks of its replica meet, with the token read. Raises ConfigError."""
        if not self.meets_over_tcp:
            return self._ranks_path()
        with _named("rendezvous"):
            target = target_of(self.rendezvous, token=self.token, token_file=self.token_file, tls_dir=self.tls_dir)
        return replace(target, tls_name=self.tls_name)

    def _ranks_path(self) -> Path:
        address = self.rendezvous or f"{self.address}.ranks"
        if not address.startswith("unix:"):
            reason = f"{self.address!r} is no Unix socket, beside which the ranks of a machine would meet"
            raise ConfigError("rendezvous", reason, "Write unix:/path, in a directory of mode 0700.")
        with _named("rendezvous"):
            path = parse_target(address).path
        assert path is not None, "it is a Unix socket"
        return path

    def keep_to_share(self) -> None:
        """Called before anything imports torch."""
        if self.gpu:
            os.environ[VISIBLE] = self.gpu
        if self.cpus:  # empty on systems that cannot bind a process
            os.sched_setaffinity(0, {int(cpu) for cpu in self.cpus.split(",")})


@contextmanager
def _named(key: str) -> Iterator[None]:
    try:
        yield
    except ConfigError as error:
        raise error.at(key) from error


def load_process_config(path: str | Path, find: FindGpus = find_gpus) -> tuple[ProcessConfig, EngineConfig]:
    return process_config_from(read_json_object(path), find)


def process_config_from(data: dict[str, object], find: FindGpus = find_gpus) -> tuple[ProcessConfig, EngineConfig]:
    """Raises ConfigError naming the key."""
    engine = decode(EngineConfig, section(data, "engine"), "engine").checked(find)
    if engine.tensor_parallel_size == AUTO:
        remedy = "Give the number, to each of them."
        raise ConfigError("tensor_parallel_size", f"{AUTO} is for what starts all ranks of a replica, and this command starts one", remedy)
    process = decode(ProcessConfig, data)
    check_options(process)
    check_secret("site_key", process.site_key)
    check_secret("block_key", process.block_key)
    if process.site_key and process.block_key:
        raise ConfigError("block_key", "is given beside site_key, of which it is made", "Leave it out.")
    _check_rank(process, engine)
    check_target(process.address, token=process.token, token_file=process.token_file, tls_dir=process.own_tls_dir)
    return replace(process, block_key=process.block_key or site_secret(process.site_key, BLOCKS)), engine


def _check_rank(process: ProcessConfig, engine: EngineConfig) -> None:
    world = engine.parallelism.world
    if process.tls_name and not (process.meets_over_tcp and process.tls_dir):
        raise ConfigError("tls_name", "is given for ranks that do not meet over TLS", "Leave it out.")
    if process.tls_name and HOST_NAME.fullmatch(process.tls_name) is None:
        raise ConfigError("tls_name", f"{process.tls_name!r} is no host's name", "Write one that the certificates of the ranks have.")
    if process.rank >= world:
        options = "tensor_parallel_size x pipeline_parallel_size"
        raise ConfigError("rank", f"{process.rank} is outside 0..{world - 1}", f"A replica has {options} = {world} of them.")
    if world > 1:
        process.check_rendezvous(engine.parallelism)
    elif process.rendezvous:
        raise ConfigError("rendezvous", "is given for a replica of one process", "Leave it out.")


def section(data: dict[str, object], key: str) -> Mapping[str, object]:
    """Raises ConfigError."""
    value = data.pop(key, None)
    if not isinstance(value, dict):
        raise ConfigError(key, "is missing" if value is None else "is not an object")
    return value
