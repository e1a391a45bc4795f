"""Tests an engine's file: what is wrong is named, nothing is ignored."""

from __future__ import annotations

import json
import os
from pathlib import Path

import pytest
from tls_kit import authority, write_certificates

from headrace.core.errors import ConfigError
from headrace.engine.server.config import load_process_config
from headrace.wire.target import GrpcTarget
from headrace.wire.tls.files import TlsRole, files_in

pytestmark = pytest.mark.pure

GOOD = {"replica": "r", "address": "unix:/tmp/x.sock", "engine": {"model": "/m", "max_num_seqs": 8}}
STAGES = {**GOOD, "engine": {"model": "/m", "device": "cpu", "pipeline_parallel_size": 3}}
PAIR = {**GOOD, "engine": {"model": "/m", "device": "cpu", "tensor_parallel_size": 2}}


def write(folder: Path, content: object) -> Path:
    path = folder / "e.json"
    path.write_text(content if isinstance(content, str) else json.dumps(content))
    return path


def test_a_good_file_gives_both_configurations(tmp_path: Path) -> None:
    process, engine = load_process_config(write(tmp_path, {**GOOD, "drain_timeout_s": 3}))
    assert (process.replica, process.drain_timeout_s, process.token) == ("r", 3, None)
    assert (engine.model, engine.max_num_seqs) == ("/m", 8)


@pytest.mark.parametrize(
    ("content", "words"),
    [
        ("{", "cannot be read as JSON"),
        ("[1]", "not a JSON object"),
        ("[" * 100000, "cannot be read as JSON"),
        ({**GOOD, "adress": "x"}, "Did you mean address"),
        ({**GOOD, "drain_timeout_s": "long"}, "drain_timeout_s"),
        ({**GOOD, "drain_timeout_s": -1}, "drain_timeout_s: -1.0 is negative"),
        ({**GOOD, "token": 5}, "token"),
        ({"replica": "r", "engine": {"model": "/m"}}, "address: is missing"),
        ({"replica": "r", "address": "unix:/x"}, "engine: is missing"),
        ({**GOOD, "engine": []}, "engine: is not an object"),
        ({**GOOD, "engine": {"model": "/m", "max_num_seq": 8}}, "Did you mean max_num_seqs"),
        ({**GOOD, "engine": {"model": "/m", "max_num_seqs": True}}, "engine.max_num_seqs"),
        ({**GOOD, "engine": {"model": "/m", "max_num_seqs": 1.5}}, "engine.max_num_seqs"),
        ({**GOOD, "engine": {"model": "/m", "max_model_len": "x"}}, "engine.max_model_len"),
        ({**GOOD, "engine": {"model": "/m", "dtype": "int3"}}, "dtype"),
        ({**GOOD, "engine": {}}, "engine.model: is missing"),
        ({**GOOD, "site_key": "ab" * 16, "block_key": "cd" * 16}, "block_key: is given beside site_key"),
        ({**GOOD, "rank": 1}, r"rank: 1 is outside 0..0. A replica has .* = 1 of them"),
        ({**PAIR, "rank": 2}, r"rank: 2 is outside 0..1. A replica has .* = 2 of them"),
        ({**GOOD, "rendezvous": "unix:/tmp/x"}, "rendezvous: is given for a replica of one process. Leave it out."),
        ({**PAIR, "rendezvous": "10.0.0.1:80"}, "rendezvous: '10.0.0.1:80' is for stages on several machines, and the ranks of"),
        ({**PAIR, "address": "127.0.0.1:80", "token": "x" * 16}, "rendezvous: '127.0.0.1:80' is no Unix socket, beside which"),
        ({**STAGES, "rendezvous": "10.0.0.1:80"}, "rendezvous: '10.0.0.1' is not a loopback address, and no certificates are given"),
        ({**STAGES, "rendezvous": "127.0.0.1:80"}, "rendezvous: '127.0.0.1:80' needs a token"),
        ({**STAGES, "rendezvous": "127.0.0.1:0", "token": "x" * 16}, "rendezvous: '127.0.0.1:0' names no port"),
        ({**STAGES, "rendezvous": "localhost"}, "rendezvous: 'localhost' is neither unix:/path nor host:port"),
        (
            {**STAGES, "rendezvous": "10.0.0.1:80", "tls_dir": "/etc/x", "rank": 1},
            r"address: unix:/tmp/x.sock cannot be reached from another machine, and rank 1 takes what .* Write HOST:PORT of this machine",
        ),
        ({**GOOD, "tls_name": "e.llm.svc"}, "tls_name: is given for ranks that do not meet over TLS. Leave it out."),
        ({**STAGES, "rendezvous": "127.0.0.1:80", "token": "x" * 16, "tls_name": "e.llm.svc"}, "tls_name: is given for ranks that do not"),
        *(
            ({**STAGES, "rendezvous": "gpu1:80", "tls_dir": "/etc/x", "tls_name": name}, f"tls_name: '{name}' is no host's name")
            for name in (".svc", "e:7100", "e." + "x" * 64)
        ),
        ({**PAIR, "rendezvous": "unix:x"}, "rendezvous: 'unix:x' is not an absolute socket path"),
    ],
)
def test_what_is_wrong_is_named(tmp_path: Path, content: object, words: str) -> None:
    with pytest.raises(ConfigError, match=words):
        load_process_config(write(tmp_path, content))


def test_ranks_meet_beside_the_address_unless_another_place_is_given(tmp_path: Path) -> None:
    process, _ = load_process_config(write(tmp_path, {**PAIR, "rank": 1}))
    assert process.ranks_target() == Path("/tmp/x.sock.ranks")
    process, _ = load_process_config(write(tmp_path, {**PAIR, "address": "127.0.0.1:80", "token": "x" * 16, "rendezvous": "unix:/run/r"}))
    assert process.ranks_target() == Path("/run/r")


@pytest.mark.parametrize("rank", [0, 2])
def test_a_rank_of_several_machines_may_have_its_gateways_at_a_socket(tmp_path: Path, rank: int) -> None:
    given = {**STAGES, "rendezvous": "gpu1:7100", "tls_dir": str(tmp_path), "tls_name": "e.llm.svc", "rank": rank}
    write_certificates(tmp_path, authority(), TlsRole.RANK, "gpu1")
    (tmp_path / "token").touch(mode=0o600)
    (tmp_path / "token").write_text("x" * 16)
    process, _ = load_process_config(write(tmp_path, given))
    target = process.ranks_target()
    assert isinstance(target, GrpcTarget)
    assert (target.address, target.token, target.tls, target.tls_name) == ("gpu1:7100", "x" * 16, files_in(tmp_path), "e.llm.svc")
    assert process.target().tls is None


def test_a_missing_file_is_named(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"none\.json"):
        load_process_config(tmp_path / "none.json")


def test_an_engine_beside_others_keeps_to_its_cpus(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    bound: list[set[int]] = []
    monkeypatch.setattr(os, "sched_setaffinity", lambda pid, cpus: bound.append(cpus))
    process, _ = load_process_config(write(tmp_path, {**GOOD, "cpus": "0,3", "num_neighbours": 3}))
    process.keep_to_share()
    assert bound == [{0, 3}]


def test_an_engine_sees_the_gpu_that_it_was_given_alone(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "0,1")
    process, _ = load_process_config(write(tmp_path, GOOD))
    process.keep_to_share()
    assert os.environ["CUDA_VISIBLE_DEVICES"] == "0,1"
    process, _ = load_process_config(write(tmp_path, {**GOOD, "gpu": "1"}))
    process.keep_to_share()
    assert os.environ["CUDA_VISIBLE_DEVICES"] == "1"
