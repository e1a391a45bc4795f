"""Decodes what an engine process is started with: JSON of the supervisor, or an operator's file or flags.

{"replica": "demo-0", "address": "unix:/run/user/1000/headrace-x/e0.sock", "engine": {"model": "/models/demo", "max_num_seqs": 32}}
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path

from headrace.core.errors import ConfigError
from headrace.core.hashing import BLOCKS, check_secret, site_secret
from headrace.core.option import Role, check_options, option, required
from headrace.core.parallelism import AUTO
from headrace.core.strict_decode import decode, read_json_object
from headrace.engine.config import EngineConfig, FindGpus
from headrace.machine.gpus import VISIBLE, find_gpus
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
        "Where the processes of a replica meet: `unix:/path` in a directory of mode 0700.",
        shown="`address` and `.ranks`",
    )
    num_neighbours: int = option(0, "Other engines on this machine, or on its GPU: each takes an equal part of its memory.", low=0)
    site_key: str = option(
        "", "Hex secret of the site, as in the file of its gateways.", shown="drawn at start", role=Role.SECURITY, repr=False
    )
    block_key: str = field(default="", repr=False)

    def target(self) -> GrpcTarget:
        """With the token read and the certificates tried. Raises ConfigError."""
        target = target_of(self.address, token=self.token, token_file=self.token_file, tls_dir=self.tls_dir)
        if target.tls is not None:
            load_certificates(target.tls, TlsRole.ENGINE)
        return target

    def ranks_path(self) -> Path:
        """Where the ranks of its replica meet. Raises ConfigError."""
        address = self.rendezvous or f"{self.address}.ranks"
        if not address.startswith("unix:"):
            reason = f"{address!r} is no Unix socket, and ranks on several machines are not supported yet"
            raise ConfigError("rendezvous", reason, "Write unix:/path, in a directory of mode 0700.")
        try:
            path = parse_target(address).path
        except ConfigError as error:
            raise error.at("rendezvous") from error
        assert path is not None, "it is a Unix socket"
        return path

    def keep_to_share(self) -> None:
        """Called before anything imports torch."""
        if self.gpu:
            os.environ[VISIBLE] = self.gpu
        if self.cpus:  # empty on systems that cannot bind a process
            os.sched_setaffinity(0, {int(cpu) for cpu in self.cpus.split(",")})


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
    check_target(process.address, token=process.token, token_file=process.token_file, tls_dir=process.tls_dir)
    return replace(process, block_key=process.block_key or site_secret(process.site_key, BLOCKS)), engine


def _check_rank(process: ProcessConfig, engine: EngineConfig) -> None:
    world = engine.parallelism.world
    if process.rank >= world:
        options = "tensor_parallel_size x pipeline_parallel_size"
        raise ConfigError("rank", f"{process.rank} is outside 0..{world - 1}", f"A replica has {options} = {world} of them.")
    if world > 1:
        process.ranks_path()
    elif process.rendezvous:
        raise ConfigError("rendezvous", "is given for a replica of one process", "Leave it out.")


def section(data: dict[str, object], key: str) -> Mapping[str, object]:
    """Raises ConfigError."""
    value = data.pop(key, None)
    if not isinstance(value, dict):
        raise ConfigError(key, "is missing" if value is None else "is not an object")
    return value
