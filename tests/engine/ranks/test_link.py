"""Tests how ranks find one another: what joins, what is refused by name in both logs, and what becomes of the socket's path."""

from __future__ import annotations

import logging
import os
import socket
import tempfile
import threading
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path

import pytest

from headrace.core.errors import ConfigError, EngineFatal
from headrace.engine.ranks import link as ranks_link
from headrace.engine.ranks.frames import FrameKind, RankHello, frame, int_frame, json_frame
from headrace.engine.ranks.link import GATHER_S, RankLink, connect, connections, gather, join, listen, welcome

pytestmark = pytest.mark.pure

FACTS = {"dtype": "float32", "kernels": "numba"}


@pytest.fixture
def private() -> Iterator[Path]:
    with tempfile.TemporaryDirectory(prefix="hr-") as folder:
        yield Path(folder)


class Joining(threading.Thread):
    """A member that says hello at its end of a socket pair."""

    def __init__(self, hello: RankHello) -> None:
        super().__init__(daemon=True)
        self.theirs, self._mine = socket.socketpair()
        self._link, self._hello = RankLink(self._mine, {}), hello
        self.outcome: int | Exception | None = None
        self.start()

    def run(self) -> None:
        try:
            self.outcome = join(self._link, self._hello)
        except Exception as error:
            self.outcome = error

    def leave(self) -> None:
        """As the end of its process would."""
        self._mine.shutdown(socket.SHUT_RDWR)
        self.join(60)

    def result(self) -> int | Exception | None:
        self.join(60)
        return self.outcome


def test_members_join_in_any_order_and_get_the_same_memory() -> None:
    joining = [Joining(RankHello(rank, FACTS)) for rank in (3, 1, 2)]
    links = gather((each.theirs for each in joining), 4, FACTS)
    assert list(links) == [1, 2, 3]
    fd = os.memfd_create("test")
    os.write(fd, b"shared")
    welcome(links, fd)
    os.close(fd)
    for each in joining:
        theirs = each.result()
        assert isinstance(theirs, int), theirs
        assert os.pread(theirs, 6, 0) == b"shared"
        os.close(theirs)


@pytest.mark.parametrize(
    ("hello", "why"),
    [
        (RankHello(2, FACTS), "rank 2 is refused: it is outside 1..1"),
        (RankHello(0, FACTS), "rank 0 is refused: it is outside 1..1"),
        (RankHello(1, {**FACTS, "dtype": "bfloat16"}), "rank 1 is refused: dtype is bfloat16, and float32 at rank 0"),
        (RankHello(1, {"dtype": "float32", "seed": "1"}), "kernels is not said, and numba at rank 0; seed is 1, and not said at rank 0"),
    ],
)
def test_a_member_that_does_not_match_is_refused_in_both_logs_and_another_may_come(
    hello: RankHello, why: str, caplog: pytest.LogCaptureFixture
) -> None:
    wrong, right = Joining(hello), Joining(RankHello(1, FACTS))
    with caplog.at_level(logging.ERROR):
        links = gather((each.theirs for each in (wrong, right)), 2, FACTS)
    assert why in caplog.text
    refusal = wrong.result()
    assert isinstance(refusal, ConfigError)
    assert why in str(refusal)
    assert list(links) == [1]


def test_a_member_that_comes_again_takes_the_place_of_one_whose_machine_closed_no_link() -> None:
    joining = [Joining(RankHello(rank, FACTS)) for rank in (1, 1, 2)]
    links = gather((each.theirs for each in joining), 3, FACTS, lambda hello, others: "it is there" if hello.rank in others else "")
    assert [links[rank].fileno() for rank in (1, 2)] == [each.theirs.fileno() for each in joining[1:]]
    refusal = joining[0].result()
    assert isinstance(refusal, ConfigError)
    assert "rank 1 is refused: it has come again, and the later one is taken" in str(refusal)


def test_a_member_that_does_not_fit_takes_no_ones_place() -> None:
    joining = [Joining(RankHello(1, FACTS)), Joining(RankHello(1, {**FACTS, "dtype": "bfloat16"})), Joining(RankHello(2, FACTS))]
    links = gather((each.theirs for each in joining), 3, FACTS)
    assert links[1].fileno() == joining[0].theirs.fileno()
    assert isinstance(joining[1].result(), ConfigError)


def test_a_member_that_died_while_others_are_missing_has_a_successor() -> None:
    died = Joining(RankHello(1, FACTS))

    def connected() -> Iterator[socket.socket]:
        yield died.theirs
        died.leave()
        for each in joining:
            yield each.theirs

    joining = [Joining(RankHello(rank, FACTS)) for rank in (1, 2)]
    links = gather(connected(), 3, FACTS)
    assert links[1].fileno() == joining[0].theirs.fileno()
    assert died.theirs.fileno() == -1


def test_a_member_that_died_before_all_had_come_is_waited_for_again() -> None:
    died = Joining(RankHello(1, FACTS))

    def connected() -> Iterator[socket.socket]:
        yield died.theirs
        died.leave()
        yield Joining(RankHello(2, FACTS)).theirs

    with pytest.raises(EngineFatal, match=r"rank 1 of 0\.\.2 did not come"):
        gather(connected(), 3, FACTS)


def test_one_that_is_refused_may_have_left(caplog: pytest.LogCaptureFixture) -> None:
    mine, theirs = socket.socketpair()
    mine.sendall(json_frame(FrameKind.HELLO, RankHello(7, FACTS)))
    mine.close()
    right = Joining(RankHello(1, FACTS))
    with caplog.at_level(logging.ERROR):
        assert list(gather(iter([theirs, right.theirs]), 2, FACTS)) == [1]
    assert "rank 7 is refused" in caplog.text


def test_a_member_that_leaves_before_it_is_welcome_is_named() -> None:
    pairs = {rank: socket.socketpair() for rank in (1, 2)}
    pairs[2][0].close()
    fd = os.memfd_create("test")
    with pytest.raises(EngineFatal, match="rank 2: its link is closed"):
        welcome({rank: RankLink(theirs, {}) for rank, (_, theirs) in pairs.items()}, fd)
    os.close(fd)


@pytest.mark.parametrize("said", [b"GET / HTTP/1.1\r\n\r\n", frame(FrameKind.READY), int_frame(FrameKind.HELLO, 1), b""])
def test_what_says_no_hello_is_closed_and_the_others_are_waited_for(said: bytes, caplog: pytest.LogCaptureFixture) -> None:
    mine, theirs = socket.socketpair()
    mine.sendall(said)
    mine.shutdown(socket.SHUT_WR)
    right = Joining(RankHello(1, FACTS))
    with caplog.at_level(logging.ERROR):
        assert list(gather(iter([theirs, right.theirs]), 2, FACTS)) == [1]
    assert "a rank that came to this replica is refused" in caplog.text
    assert mine.recv(1) == b""


def test_what_says_nothing_is_given_up(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ranks_link, "HELLO_S", 0.001)
    mine, theirs = socket.socketpair()
    with pytest.raises(EngineFatal, match=r"rank 1 of 0\.\.1 did not come"):
        gather(iter([theirs]), 2, FACTS)
    assert mine.recv(1) == b""


def test_ranks_that_do_not_come_are_named() -> None:
    joining = Joining(RankHello(2, FACTS))
    with pytest.raises(EngineFatal, match=r"rank 1, 3 of 0\.\.3 did not come within 600 s\. Start all ranks of the replica."):
        gather(iter([joining.theirs]), 4, FACTS)
    assert isinstance(joining.result(), EngineFatal), "rank 0 has left"


@pytest.mark.socket
def test_a_path_is_listened_at_again_after_its_last_listener_was_killed(private: Path) -> None:
    path = private / "ranks"
    listen(path).close()
    assert path.exists()
    with closing(listen(path)), pytest.raises(ConfigError, match="rendezvous: another replica's ranks gather at"):
        listen(path)


@pytest.mark.socket
def test_a_directory_open_to_others_or_missing_is_refused(private: Path) -> None:
    private.chmod(0o750)
    with pytest.raises(ConfigError, match="rendezvous: the socket's directory is open to other users"):
        listen(private / "ranks")
    with pytest.raises(ConfigError, match=r"rendezvous: .*none does not exist\. Make it, with mode 0700"):
        listen(private / "none" / "ranks")


@pytest.mark.socket
def test_a_path_that_cannot_be_listened_at_is_refused_by_name(private: Path) -> None:
    with pytest.raises(ConfigError, match=r"rendezvous: cannot listen at .*x \(AF_UNIX path too long\)\. Choose a path"):
        listen(private / ("x" * 100))
    with pytest.raises(ConfigError, match=r"rendezvous: cannot listen at .* \(File name too long\)\. Choose a path"):
        listen(private / ("x" * 300) / "ranks")
    file = private / "ranks"
    file.write_text("kept")
    with pytest.raises(ConfigError, match=r"rendezvous: cannot listen at .*ranks \(Address already in use\)\. Choose a path"):
        listen(file)
    assert file.read_text() == "kept", "only a socket is removed"


@pytest.mark.socket
def test_a_member_goes_to_no_directory_that_is_open_to_others(private: Path) -> None:
    with closing(listen(private / "ranks")) as listening:
        private.chmod(0o770)
        with pytest.raises(ConfigError, match="rendezvous: the socket's directory is open to other users"):
            connect(private / "ranks")
        listening.setblocking(False)
        with pytest.raises(BlockingIOError):
            listening.accept()


@pytest.mark.socket
def test_rank_0_stops_waiting_for_connections(private: Path) -> None:
    times = iter([0.0, GATHER_S - 0.001, GATHER_S])
    with closing(listen(private / "ranks")) as listening:
        assert list(connections(listening, clock=lambda: next(times))) == []


@pytest.mark.socket
def test_the_starter_of_the_ranks_can_end_the_wait_for_them(private: Path) -> None:
    def check() -> None:
        raise ConfigError("rank 1", "ended with status 9")

    with closing(listen(private / "ranks")) as listening, pytest.raises(ConfigError, match="rank 1: ended"):
        next(connections(listening, check))


@pytest.mark.socket
def test_a_member_tries_until_rank_0_listens(private: Path) -> None:
    listening: list[socket.socket] = []
    path = private / "ranks"
    connected = connect(path, sleep=lambda _: listening.append(listen(path)))
    [accepting] = listening
    with accepting, connected, next(connections(accepting)) as accepted:
        accepted.sendall(b"x")
        assert connected.recv(1) == b"x"


@pytest.mark.socket
def test_a_member_stops_trying_and_says_once_why_it_does(private: Path, caplog: pytest.LogCaptureFixture) -> None:
    """It may be started again: rank 0 may come later."""
    caplog.set_level(logging.INFO)
    now = 0.0

    def sleep(seconds: float) -> None:
        nonlocal now
        now += seconds

    with pytest.raises(EngineFatal, match=r"rank 0 does not listen at .* after 600 s"):
        connect(private / "ranks", clock=lambda: now, sleep=sleep)
    [said] = caplog.messages
    assert said.endswith("ranks (No such file or directory): trying again for at most 600 s")


def test_frames_come_whole_however_they_are_cut() -> None:
    mine, theirs = socket.socketpair()
    link = RankLink(theirs, {FrameKind.COPY: 24, FrameKind.BEAT: 0})
    for byte in int_frame(FrameKind.COPY, 1, 2, 3):
        assert list(link.arrived()) == []
        mine.sendall(bytes([byte]))
    mine.sendall(frame(FrameKind.BEAT) * 2)
    assert [kind for kind, _ in link.arrived()] == [FrameKind.COPY, FrameKind.BEAT, FrameKind.BEAT]
    mine.sendall(frame(FrameKind.BEAT) + b"HRK")
    mine.close()
    arrived = link.arrived()
    assert next(arrived)[0] is FrameKind.BEAT
    with pytest.raises(EngineFatal, match="its link is closed"):
        next(arrived)
    with pytest.raises(EngineFatal, match="its link is closed"):
        link.send(frame(FrameKind.BEAT))
    link.close()
