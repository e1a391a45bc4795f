"""One end of the link between rank 0 and another rank, over which frames go both ways: a Unix socket, over which one file descriptor comes
too, or a connection to another machine (`network`).

On one machine rank 0 listens in a directory that only its user may open, until all ranks have said hello; the file descriptor is that of
the memory they share.
"""

from __future__ import annotations

import errno
import logging
import os
import socket
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, suppress
from pathlib import Path
from queue import SimpleQueue
from typing import Protocol, TypeVar

from headrace.core.backoff import Backoff
from headrace.core.clock import Clock
from headrace.core.errors import ConfigError, EngineFatal
from headrace.engine.ranks.frames import (
    HEADER,
    MAX_JSON_BYTES,
    Allowed,
    FrameKind,
    RankFailure,
    RankHello,
    frame,
    json_frame,
    read_header,
    read_json,
)
from headrace.machine.private_files import check_socket_folder

log = logging.getLogger(__name__)

GATHER_S = 600.0
"""Seconds that rank 0 waits for the others, and they for it: by hand they are started one after the other."""
HELLO_S = 10.0
"""A connection that says nothing, which only a process of this user can make, keeps the others waiting that long."""
RETRY_S = 0.1
CHECK_S = 0.5
CHUNK_BYTES = 1 << 16
SILENT_S = 1.5
"""For which a machine that is lost acknowledges nothing."""

Frame = tuple[FrameKind, bytearray]
_Connected = TypeVar("_Connected")


class Connection(Protocol):
    """What a link needs of a socket, or of TLS over one."""

    def fileno(self) -> int: ...
    def sendall(self, data: bytes, /) -> None: ...
    def recv(self, num_bytes: int, flags: int = 0, /) -> bytes: ...
    def settimeout(self, timeout_s: float | None, /) -> None: ...
    def setsockopt(self, level: int, option: int, value: int, /) -> None: ...
    def shutdown(self, how: int, /) -> None: ...
    def close(self) -> None: ...


class RankLink:
    """
    allowed  what the other end may send now; whoever reads sets it. `send` may be called from several threads, reading from one
    hello    that the other end has said, where `gather` made the link
    """

    hello: RankHello

    def __init__(self, connected: Connection, allowed: Allowed) -> None:
        self.allowed = allowed
        self._socket = connected
        self._sending = threading.Lock()
        self._received = bytearray()

    def fileno(self) -> int:
        return self._socket.fileno()

    def send(self, data: bytes) -> None:
        """Waits while the other end reads nothing. Raises EngineFatal once the link is closed."""
        try:
            with self._sending:
                self._socket.sendall(data)
        except OSError as error:
            raise EngineFatal(f"its link is closed ({error.strerror or error})") from error

    def receive(self) -> Frame:
        """Waits for a frame. Raises EngineFatal for what is none, and once the link is closed."""
        while (found := self._next()) is None:
            self._take(0)
        return found

    def read_ahead(self, last: FrameKind) -> Callable[[], Frame]:
        """A thread reads all frames to the one of kind `last` as they come, so that the other end never waits to send. Returns what is to
        be called in place of `receive`."""
        frames: SimpleQueue[Frame | EngineFatal] = SimpleQueue()

        def read() -> None:
            try:
                kind = None
                while kind is not last:
                    frames.put(found := self.receive())
                    kind = found[0]
            except EngineFatal as error:
                frames.put(error)

        def receive() -> Frame:
            found = frames.get()
            if isinstance(found, EngineFatal):
                raise found
            return found

        threading.Thread(target=read, name="headrace-frames", daemon=True).start()
        return receive

    def arrived(self) -> Iterator[Frame]:
        """The frames that are there, without waiting. Raises as `receive` does, behind the last of them."""
        while True:
            while (found := self._next()) is not None:
                yield found
            try:
                self._take(socket.MSG_DONTWAIT)
            except BlockingIOError:
                return

    def send_descriptor(self, data: bytes, fd: int) -> None:
        assert isinstance(self._socket, socket.socket), "a descriptor stays on its machine"
        socket.send_fds(self._socket, [data], [fd])

    def receive_descriptor(self) -> tuple[Frame, int | None]:
        """The next frame, and the descriptor that came with it."""
        assert isinstance(self._socket, socket.socket), "a descriptor stays on its machine"
        try:
            data, fds, *_ = socket.recv_fds(self._socket, CHUNK_BYTES, 1)
        except OSError as error:
            raise EngineFatal(f"its link is closed ({error.strerror})") from error
        if not data:
            raise EngineFatal("its link is closed")
        self._received += data
        return self.receive(), fds[0] if fds else None

    def wait_at_most(self, timeout_s: float | None) -> None:
        self._socket.settimeout(timeout_s)

    def end_when_silent(self) -> None:
        """Once the other end's machine is lost, for a link over which beats go. Not for one that is not read for longer than SILENT_S."""
        self._socket.setsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT, round(1000 * SILENT_S))

    def is_closed(self) -> bool:
        """By the other end. Reads nothing: not meant for a link over which something may have come."""
        try:
            return not self._socket.recv(1, socket.MSG_PEEK | socket.MSG_DONTWAIT)
        except BlockingIOError:
            return False
        except OSError:
            return True

    def shut(self) -> None:
        """Both ends read no more, and a `send` that waits returns. The socket stays this object's."""
        with suppress(OSError):  # the other end has closed it
            self._socket.shutdown(socket.SHUT_RDWR)

    def wait_until_closed(self, timeout_s: float) -> None:
        """By the other end, of which nothing is read any more."""
        deadline = time.monotonic() + timeout_s
        try:
            while (left := deadline - time.monotonic()) > 0:
                self._socket.settimeout(left)
                if not self._socket.recv(CHUNK_BYTES):
                    return
        except OSError:
            return

    def close(self) -> None:
        self._socket.close()

    def _take(self, flags: int) -> None:
        try:
            data = self._socket.recv(CHUNK_BYTES, flags)
        except BlockingIOError:
            raise
        except OSError as error:  # a time limit too
            raise EngineFatal(f"its link is closed ({error.strerror or error})") from error
        if not data:
            raise EngineFatal("its link is closed")
        self._received += data

    def _next(self) -> Frame | None:
        received = self._received
        if len(received) < HEADER.size:
            return None
        kind, num_bytes = read_header(received, self.allowed)
        end = HEADER.size + num_bytes
        if len(received) < end:
            return None
        payload = received[HEADER.size : end]
        del received[:end]
        return kind, payload


def listen(path: Path) -> socket.socket:
    """Raises ConfigError, also where another replica's ranks gather at the path."""
    try:
        if not path.parent.is_dir():
            raise ConfigError("rendezvous", f"{path.parent} does not exist", "Make it, with mode 0700.")
        check_socket_folder("rendezvous", path)
        with socket.socket(socket.AF_UNIX) as probe:
            status = probe.connect_ex(os.fspath(path))
        if status == 0:
            raise ConfigError("rendezvous", f"another replica's ranks gather at {path}", "Give each replica one of its own.")
        if status == errno.ECONNREFUSED and path.is_socket():
            path.unlink()  # left behind by one that was killed
        with ExitStack() as unless_listening:
            listening = unless_listening.enter_context(socket.socket(socket.AF_UNIX))
            listening.bind(os.fspath(path))
            listening.listen()
            unless_listening.pop_all()
            return listening
    except OSError as error:
        remedy = "Choose a path that is free, of at most 107 bytes, in a directory of yours."
        raise ConfigError("rendezvous", f"cannot listen at {path} ({error.strerror or error})", remedy) from error


def connections(
    listening: socket.socket, check: Callable[[], None] = lambda: None, clock: Clock = time.monotonic
) -> Iterator[socket.socket]:
    """Ends GATHER_S after the first was asked for. check: called now and then; what it raises ends the wait"""
    deadline = clock() + GATHER_S
    while (left := deadline - clock()) > 0:
        check()
        listening.settimeout(min(left, CHECK_S))
        try:
            yield listening.accept()[0]
        except TimeoutError:
            continue


WhyNot = Callable[[RankHello, Mapping[int, RankLink]], str]


def gather(
    connected: Iterator[Connection], world: int, facts: Mapping[str, str], why_apart: WhyNot = lambda hello, links: ""
) -> dict[int, RankLink]:
    """The links of ranks 1 to world - 1, once each has said hello. What does not fit is refused, and waited for again. One that comes
    again is taken: a machine that has lost power closes no link.

    why_apart  why a rank that fits cannot join those that have come; empty: it can

    Raises EngineFatal where `connected` ends before: started again, they may meet.
    """
    links: dict[int, RankLink] = {}
    while len(links) < world - 1:
        connection = next(connected, None)
        if connection is None:
            _close_all(links)
            missing = ", ".join(str(rank) for rank in range(1, world) if rank not in links)
            raise EngineFatal(f"rank {missing} of 0..{world - 1} did not come within {GATHER_S:g} s. Start all ranks of the replica.")
        link = RankLink(connection, {FrameKind.HELLO: MAX_JSON_BYTES})
        try:
            link.wait_at_most(HELLO_S)
            hello = read_json(RankHello, link.receive()[1])
            for left in [rank for rank, joined in links.items() if joined.is_closed()]:
                links.pop(left).close()
            others = {rank: joined for rank, joined in links.items() if rank != hello.rank}
            why_not = _why_not(hello, world, facts) or why_apart(hello, others)
        except EngineFatal as error:
            log.error("a rank that came to this replica is refused: %s", error)
            link.close()
            continue
        if why_not:
            _refuse(link, why_not)
            continue
        if hello.rank in links:
            _refuse(links[hello.rank], f"rank {hello.rank} is refused: it has come again, and the later one is taken")
        link.wait_at_most(None)
        link.hello = hello
        links[hello.rank] = link
    return dict(sorted(links.items()))


def _refuse(link: RankLink, reason: str) -> None:
    log.error("%s", reason)
    with suppress(EngineFatal):  # it has left
        link.send(json_frame(FrameKind.FAILED, RankFailure(reason, is_refused=True)))
    link.close()


def _why_not(hello: RankHello, world: int, facts: Mapping[str, str]) -> str:
    """Empty: the rank may join."""
    if not 1 <= hello.rank < world:
        return f"rank {hello.rank} is refused: it is outside 1..{world - 1}"
    names = sorted(name for name in facts.keys() | hello.facts.keys() if facts.get(name) != hello.facts.get(name))
    differing = (f"{name} is {hello.facts.get(name, 'not said')}, and {facts.get(name, 'not said')} at rank 0" for name in names)
    return f"rank {hello.rank} is refused: {'; '.join(differing)}" if names else ""


def _close_all(links: Mapping[int, RankLink]) -> None:
    for link in links.values():
        link.close()


def connect(path: Path, *, clock: Clock = time.monotonic, sleep: Callable[[float], None] = time.sleep) -> socket.socket:
    """Tries again until rank 0 listens. Raises EngineFatal after GATHER_S, and ConfigError where another user could listen in its place."""

    def dial() -> socket.socket:
        check_socket_folder("rendezvous", path)
        return connect_unix(os.fspath(path))

    return until_connected(dial, f"rank 0 does not listen at {path}", clock=clock, sleep=sleep)


def until_connected(
    dial: Callable[[], _Connected],
    what_fails: str,
    *,
    max_pause_s: float = RETRY_S,
    clock: Clock = time.monotonic,
    sleep: Callable[[float], None] = time.sleep,
) -> _Connected:
    """Tries again after an OSError. Raises EngineFatal after GATHER_S."""
    deadline, logged, pauses = clock() + GATHER_S, "", Backoff(RETRY_S, max_pause_s, GATHER_S)
    while True:
        try:
            return dial()
        except OSError as error:
            reason = error.strerror or str(error)
            if clock() > deadline:
                raise EngineFatal(f"{what_fails} after {GATHER_S:g} s ({reason}). Start rank 0 with the same rendezvous.") from error
            if reason != logged:
                log.info("%s (%s): trying again for at most %g s", what_fails, reason, GATHER_S)
                logged = reason
        sleep(pauses.pause_s(0))


def connect_unix(address: str) -> socket.socket:
    with ExitStack() as unless_connected:
        connected = unless_connected.enter_context(socket.socket(socket.AF_UNIX))
        connected.connect(address)
        unless_connected.pop_all()
    return connected


def join(link: RankLink, hello: RankHello) -> int:
    """Says hello to rank 0. Returns the descriptor of the shared memory, which is the caller's.

    Raises ConfigError if rank 0 refuses this one.
    """
    say_hello(link, hello, 0)
    (kind, payload), fd = link.receive_descriptor()
    check_welcome(kind, payload)
    if fd is None:
        raise EngineFatal("rank 0 sent no shared memory")
    return fd


def say_hello(link: RankLink, hello: RankHello, max_welcome_bytes: int) -> None:
    link.allowed = {FrameKind.WELCOME: max_welcome_bytes, FrameKind.FAILED: MAX_JSON_BYTES}
    link.send(json_frame(FrameKind.HELLO, hello))


def check_welcome(kind: FrameKind, payload: bytearray) -> None:
    """Raises ConfigError if rank 0 refuses this one."""
    if kind is FrameKind.FAILED:
        raise ConfigError("rank", read_json(RankFailure, payload).reason, "Give all ranks of a replica the same options.")


def welcome(links: Mapping[int, RankLink], fd: int) -> None:
    """Raises EngineFatal where a rank has left."""
    for rank, link in links.items():
        try:
            link.send_descriptor(frame(FrameKind.WELCOME), fd)
        except OSError as error:
            raise EngineFatal(f"rank {rank}: its link is closed ({error.strerror})") from error
