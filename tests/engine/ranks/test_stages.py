"""Tests replicas whose stages are on machines of their own, with loopback for the network: what they answer, and what each refuses."""

from __future__ import annotations

import os
import socket
from collections.abc import Iterator
from contextlib import closing
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from clickhouse_kit import free_port
from rank_answers import CROWDED, SPACE, answers
from real_engine import RealEngine, check_close, greedy_request
from tiny_models import save_tiny_model
from tls_kit import TOKEN, authority, write_certificates
from torch import Tensor

from headrace.core.errors import EngineFatal
from headrace.core.parallelism import Parallelism
from headrace.engine.ranks import stages
from headrace.engine.ranks.frames import FrameKind, RankHello, frame, int_frame
from headrace.engine.ranks.link import RankLink
from headrace.engine.ranks.stage_peers import StagePeers
from headrace.tensor.peers import NoPeers
from headrace.wire.target import GrpcTarget, parse_target
from headrace.wire.tls.files import TlsRole

pytest.importorskip("headrace.tensor.kernels.cpu.backend")
pytestmark = pytest.mark.socket
HOST = "127.0.0.1"
TP2_PP2 = {"tensor_parallel_size": 2, "pipeline_parallel_size": 2}
LAYOUTS = [{"pipeline_parallel_size": 2}, {"pipeline_parallel_size": 3}, TP2_PP2]


def addresses(folder: Path, world: int, tls_name: str = "") -> list[GrpcTarget]:
    files = write_certificates(folder / "tls", authority(), TlsRole.RANK, tls_name or HOST)
    return [replace(parse_target(f"{HOST}:{free_port()}", TOKEN, files), tls_name=tls_name) for _ in range(world)]


@pytest.mark.parametrize("layout", LAYOUTS, ids=["pp 2", "pp 3", "tp 2 pp 2"])
def test_stages_on_several_machines_answer_as_one_rank_does(tmp_path: Path, layout: dict[str, int]) -> None:
    folder = save_tiny_model("gemma3", tmp_path, num_hidden_layers=3)
    expected, _ = answers(folder)
    world = layout.get("tensor_parallel_size", 1) * layout["pipeline_parallel_size"]
    found, num_preempted = answers(folder, **layout, **CROWDED, rank_addresses=addresses(tmp_path, world))
    check_close(found, expected)
    assert num_preempted > 0


def test_recorded_steps_of_stages_on_several_machines_have_the_bits_of_one_rank(tmp_path: Path) -> None:
    """Of the kernels that record a step: hidden states are sent behind it."""
    folder, options = save_tiny_model("llama", tmp_path), {**SPACE, "kernels": "auto"}
    asked = [greedy_request(f"r{number}", range(3, 20 + number), logprobs=2, max_tokens=10) for number in range(3)]
    with RealEngine(folder, **options) as engine:
        expected = engine.run(*asked).answers()
    with RealEngine(folder, **options, pipeline_parallel_size=2, rank_addresses=addresses(tmp_path, 2)) as engine:
        found = engine.run(*asked).answers()
        counters = engine.engine.snapshot().counters
    assert found == expected
    assert counters.exchanges > 2 * 10
    assert set(counters.stage_idle_microseconds) == {"0", "1"}


def test_a_middle_stage_asks_for_the_shared_name_as_rank_0_does(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its own address, which `--listen` gives, has none."""

    def listen(own: GrpcTarget) -> None:
        raise EngineFatal(f"listens as {own.tls_name}")

    monkeypatch.setattr(stages, "RankPort", listen)
    target, *_ = addresses(tmp_path, 3, "engines.llm.svc")
    with pytest.raises(EngineFatal, match=r"listens as engines\.llm\.svc"):
        stages.join_stages(target, replace(target, tls_name=""), Parallelism(pp=3, is_apart=True).place(1), {})


def test_a_middle_stage_is_known_by_the_name_that_all_certificates_have(tmp_path: Path) -> None:
    folder, asked = save_tiny_model("llama", tmp_path, num_hidden_layers=3), greedy_request("r", [1, 2, 3])
    with RealEngine(folder, **SPACE) as engine:
        expected = engine.run(asked).answer("r")
    ranks = addresses(tmp_path, 3, "engines.llm.svc")
    with RealEngine(folder, **SPACE, pipeline_parallel_size=3, rank_addresses=ranks) as engine:
        assert engine.run(asked).answer("r") == expected


def test_a_stage_that_is_lost_ends_the_replica(tmp_path: Path) -> None:
    engine = RealEngine(save_tiny_model("llama", tmp_path), **SPACE, pipeline_parallel_size=2, rank_addresses=addresses(tmp_path, 2))
    engine.run(greedy_request("r", [1, 2, 3]))
    engine.ranks.leave(1)
    with pytest.raises(EngineFatal, match="rank 1"):
        rest(engine)
    engine.engine.closing.close()
    engine.ranks.join()
    assert isinstance(engine.ranks.errors[1], EngineFatal)


def rest(engine: RealEngine) -> None:
    for _ in range(200):
        engine.engine.idle()


class NotingPeers(NoPeers):
    """Of a stage, whose other ranks get what the first one has received."""

    def __init__(self) -> None:
        self.broadcasts: list[Tensor] = []
        self.is_aborted = False

    def broadcast(self, x: Tensor) -> None:
        self.broadcasts.append(x.clone())

    def abort(self) -> None:
        self.is_aborted = True


@pytest.fixture
def links() -> Iterator[tuple[RankLink, RankLink]]:
    mine, theirs = (RankLink(end, {}) for end in socket.socketpair())
    with closing(mine), closing(theirs):
        yield mine, theirs


def peers_of(rank: int, previous: RankLink | None = None, following: RankLink | None = None) -> tuple[StagePeers, NotingPeers]:
    own = NotingPeers()
    return StagePeers(own, Parallelism(2, 2, is_apart=True).place(rank), previous, following), own


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_hidden_states_go_from_first_rank_to_first_rank_and_from_there_to_the_others(
    links: tuple[RankLink, RankLink], dtype: torch.dtype
) -> None:
    sender, receiver = peers_of(2, following=links[0])[0], peers_of(0, previous=links[1])
    x, found = torch.randn(5, 96).to(dtype), torch.empty(5, 96, dtype=dtype)
    sender.send(x)
    receiver[0].receive(found)
    assert torch.equal(found, x)
    assert torch.equal(receiver[1].broadcasts[0], x)
    other, its = peers_of(3)
    other.send(x)
    other.receive(found)
    assert len(its.broadcasts) == 1, "it takes what its stage's first rank has"


@pytest.mark.parametrize(
    ("said", "why"),
    [
        (frame(FrameKind.HIDDEN, torch.zeros(4, 96).numpy()), "the stage before this one: it sent 1536 bytes of hidden states instead of"),
        (
            frame(FrameKind.HIDDEN, torch.zeros(6, 96).numpy()),
            "a frame of kind HIDDEN has 2304 bytes, more than 1920",
        ),
        (int_frame(FrameKind.COPY, 1, 2, 3), "a frame of kind 10 where only HIDDEN may come"),
        (b"HTTP/1.1 200 OK\r\n\r\n", "a frame begins with"),
    ],
    ids=["too few", "too many", "another kind", "no frame"],
)
def test_a_stage_that_lies_is_not_believed(links: tuple[RankLink, RankLink], said: bytes, why: str) -> None:
    links[0].send(said)
    receiver, own = peers_of(0, previous=links[1])
    with pytest.raises(EngineFatal, match=why):
        receiver.receive(torch.empty(5, 96))
    assert not own.broadcasts


def test_an_aborted_stage_waits_no_more(links: tuple[RankLink, RankLink]) -> None:
    receiver, own = peers_of(0, previous=links[1])
    receiver.abort()
    assert own.is_aborted
    with pytest.raises(EngineFatal, match="the stage before this one: its link is closed"):
        receiver.receive(torch.empty(5, 96))


def test_ranks_of_a_stage_are_on_one_machine() -> None:
    parallelism = Parallelism(2, 2, is_apart=True)
    ends = socket.socketpair()
    with ends[0], ends[1]:
        joined = RankLink(ends[0], {})
        joined.hello = RankHello(2, {}, "there")
        refused = stages._why_apart(parallelism, RankHello(3, {}, "elsewhere"), {2: joined})
        assert refused.startswith("rank 3 is refused: it is on another machine than rank 2 of the same stage; tensor_parallel_size")
        assert stages._why_apart(parallelism, RankHello(3, {}, "there"), {2: joined}) == ""
        assert "than rank 0 of the same stage" in stages._why_apart(parallelism, RankHello(1, {}, "there"), {2: joined})
        assert stages._why_apart(parallelism, RankHello(1, {}, stages.machine()), {2: joined}) == ""


def test_memory_of_another_users_process_is_not_taken(monkeypatch: pytest.MonkeyPatch) -> None:
    place, group = Parallelism(2, 2, is_apart=True).place(1), f"of-a-test-{os.getpid()}"
    with socket.socket(socket.AF_UNIX) as listening:
        listening.bind(f"\0headrace-ranks-{group}-{place.stage}")
        listening.listen()
        user = os.geteuid()
        monkeypatch.setattr(os, "geteuid", lambda: user + 1)
        with pytest.raises(EngineFatal, match="is offered by another user"):
            stages._shared_memory(place, group, lambda: None)
