"""The way between ranks on several machines: TLS and a token in both directions of trust, before any frame is read.

A rank that is dialled listens at a `RankPort`: rank 0, and the first rank of a middle stage. Both ends show certificates of one authority,
but on loopback addresses, where there need be none; then the one that dials sends the digest of the token, is answered AUTHENTICATED, and
frames begin. What has not done that within HELLO_S is closed. A port listens until the ranks that it is for have come. The end that dials
asks for a certificate of the host, and with `tls_name` both ends ask for one of that name.
"""

from __future__ import annotations

import hashlib
import hmac
import logging
import socket
import ssl
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager, suppress
from functools import partial
from queue import Empty, SimpleQueue

from headrace.core.clock import Clock
from headrace.core.errors import ConfigError, EngineFatal
from headrace.engine.ranks.frames import MAX_JSON_BYTES, FrameKind, OtherProtocol, RankFailure, frame, json_frame, read_json
from headrace.engine.ranks.link import CHECK_S, CHUNK_BYTES, GATHER_S, HELLO_S, Connection, RankLink, until_connected
from headrace.wire.listening import RefusalLog, close_all, listening_sockets, shown_address
from headrace.wire.target import GrpcTarget
from headrace.wire.tls.files import TlsRole, handshake_fault, load_certificates

log = logging.getLogger(__name__)

BACKLOG = 64
MAX_HANDSHAKES = 64
"""Connections that have not shown their token yet: one more closes the oldest."""
ACCEPT_PAUSE_S = 0.1
DIAL_S = 5.0
MAX_PAUSE_S = 2.0
"""Between attempts: the name of a pod that does not run yet is ten queries to the cluster's name server."""
PIECE_BYTES = 1 << 20
WRONG_TOKEN = "its token is missing or wrong"


class TlsSocket:
    """Implements `Connection`: TLS over a socket. One thread may receive while others send, which OpenSSL alone does not allow."""

    def __init__(self, plain: socket.socket, context: ssl.SSLContext, host: str | None = None) -> None:
        """host: that the other end's certificate is for; None: this end was dialled"""
        self._plain = plain
        self._incoming, self._outgoing = ssl.MemoryBIO(), ssl.MemoryBIO()
        self._tls = context.wrap_bio(self._incoming, self._outgoing, server_side=host is None, server_hostname=host)
        self._using, self._sending = threading.Lock(), threading.Lock()
        self.fileno, self.settimeout, self.setsockopt = plain.fileno, plain.settimeout, plain.setsockopt
        self.shutdown, self.close = plain.shutdown, plain.close

    def shake_hands(self) -> None:
        """Raises ssl.SSLError, after the alert was sent, or OSError."""
        while True:
            try:
                self._tls.do_handshake()
                break
            except ssl.SSLWantReadError:
                self._plain.sendall(self._outgoing.read())
                if not self._fill(0):
                    raise ConnectionResetError("it was closed within the handshake") from None
            except ssl.SSLError:
                with suppress(OSError):
                    self._plain.sendall(self._outgoing.read())
                raise
        self._plain.sendall(self._outgoing.read())

    def is_for(self, name: str) -> bool:
        """The other end's certificate, after `shake_hands`. OpenSSL asks for a name only at the end that dials. Empty: any will do."""
        certificate = self._tls.getpeercert() or {}
        names = {str(entry[-1]).lower() for entry in certificate.get("subjectAltName", ())}
        return not name or not names.isdisjoint((name.lower(), f"*.{name.lower().partition('.')[2]}"))

    def recv(self, num_bytes: int, flags: int = 0) -> bytes:
        if flags & socket.MSG_PEEK:
            return self._plain.recv(num_bytes, flags)
        while True:
            with self._using:
                try:
                    return self._tls.read(num_bytes)
                except ssl.SSLWantReadError:
                    pass
                except ssl.SSLZeroReturnError:
                    return b""
            if not self._fill(flags):
                return b""

    def sendall(self, data: bytes) -> None:
        left = memoryview(data)
        with self._sending:
            while left:
                with self._using:
                    left = left[self._tls.write(left[:PIECE_BYTES]) :]
                    records = self._outgoing.read()
                self._plain.sendall(records)

    def _fill(self, flags: int) -> bool:
        data = self._plain.recv(CHUNK_BYTES, flags)
        with self._using:
            self._incoming.write(data)
        return bool(data)


class RankPort:
    """Listens until it is closed. Raises ConfigError where it cannot."""

    def __init__(self, target: GrpcTarget) -> None:
        self._target, self._proof = target, _proof_of(target)
        self._context = None if target.tls is None else load_certificates(target.tls, TlsRole.ENGINE).context
        self._known = SimpleQueue[Connection]()
        self._slots = threading.Semaphore(MAX_HANDSHAKES)
        self._greeted = dict[socket.socket, str]()  # the oldest first
        self._closing = threading.Lock()
        self._is_closed = False
        self._log_refusal = RefusalLog(time.monotonic)
        try:
            self._sockets = listening_sockets(target.host, target.port, backlog=BACKLOG)
        except OSError as error:
            raise ConfigError(
                "rendezvous", f"cannot listen at {target.address} ({error.strerror})", "Choose an address that is free."
            ) from error
        self.address = shown_address(self._sockets[0])
        for listening in self._sockets:
            threading.Thread(target=self._accept, args=(listening,), name="headrace-rank-port", daemon=True).start()

    def connections(self, check: Callable[[], None] = lambda: None, clock: Clock = time.monotonic) -> Iterator[Connection]:
        """The connections whose other end has shown certificate and token. As `link.connections`."""
        deadline = clock() + GATHER_S
        while (left := deadline - clock()) > 0:
            check()
            with suppress(Empty):
                yield self._known.get(timeout=min(left, CHECK_S))

    def close(self) -> None:
        with self._closing:
            self._is_closed = True
        for listening in self._sockets:
            with suppress(OSError):
                listening.shutdown(socket.SHUT_RDWR)  # ends `accept`
        close_all(self._sockets)
        with suppress(Empty):
            while True:
                self._known.get_nowait().close()

    def _accept(self, listening: socket.socket) -> None:
        while not self._is_closed:
            try:
                connected, address = listening.accept()
            except OSError as error:
                if not self._is_closed:
                    self._log_refusal("any address", f"no connection can be accepted ({error.strerror})")
                    time.sleep(ACCEPT_PAUSE_S)
                continue
            if not self._slots.acquire(blocking=False):
                self._close_oldest()
                self._slots.acquire()
            with self._closing:
                self._greeted[connected] = str(address[0])
            threading.Thread(target=self._greet, args=(connected, str(address[0])), name="headrace-rank-hello", daemon=True).start()

    def _close_oldest(self) -> None:
        with self._closing:
            for oldest, host in list(self._greeted.items())[:1]:
                del self._greeted[oldest]
                self._log_refusal(host, f"{MAX_HANDSHAKES} later connections have not shown a token yet")
                with suppress(OSError):
                    oldest.shutdown(socket.SHUT_RDWR)  # its thread ends

    def _greet(self, connected: socket.socket, host: str) -> None:
        with ExitStack() as ending:
            ending.callback(self._slots.release)
            ending.callback(connected.close)
            ending.callback(self._greeted.pop, connected, None)
            try:
                with _closed_after(HELLO_S, connected):
                    known = self._authenticated(connected)
            except OSError as error:
                ca = "" if self._target.tls is None else self._target.tls.ca
                if connected in self._greeted:
                    self._log_refusal(host, handshake_fault(error, own="this rank", peer="the other rank", ca=ca) or str(error))
                return
            with self._closing:
                if self._greeted.pop(connected, None) is not None and not self._is_closed:
                    self._known.put(known)
                    ending.pop_all()
                    self._slots.release()

    def _authenticated(self, connected: socket.socket) -> Connection:
        """Raises OSError."""
        connected.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        connection: Connection = connected
        if self._context is not None:
            connection = tls = TlsSocket(connected, self._context)
            tls.shake_hands()
        given = b""
        while len(given) < len(self._proof):
            if not (data := connection.recv(len(self._proof) - len(given))):
                raise ConnectionResetError(f"it did not send its token within {HELLO_S:g} s")
            given += data
        why_not = "" if hmac.compare_digest(given, self._proof) else WRONG_TOKEN
        if not why_not and isinstance(connection, TlsSocket) and not connection.is_for(self._target.tls_name):
            why_not = f"its certificate is not for {self._target.tls_name}"
        if why_not:
            connection.sendall(json_frame(FrameKind.FAILED, RankFailure(why_not, is_refused=True)))
            raise PermissionError(why_not)
        connection.sendall(frame(FrameKind.AUTHENTICATED))
        return connection


@contextmanager
def _closed_after(seconds: float, connected: socket.socket) -> Iterator[None]:
    """However slowly bytes come."""

    def shut() -> None:
        with suppress(OSError):
            connected.shutdown(socket.SHUT_RDWR)

    timer = threading.Timer(seconds, shut)
    timer.daemon = True
    timer.start()
    try:
        yield
    finally:
        timer.cancel()


def _proof_of(target: GrpcTarget) -> bytes:
    """The port takes as many bytes of anything, whatever it is."""
    assert target.token is not None, "TCP has a token"
    return hashlib.sha256(b"headrace rank " + target.token.encode()).digest()


def dial(target: GrpcTarget, check: Callable[[], None] = lambda: None, clock: Clock = time.monotonic) -> RankLink:
    """Tries again until a rank listens there. check: as `link.connections`

    Raises EngineFatal after GATHER_S, and ConfigError for certificates or a token that either end refuses, or for what is no rank.
    """
    context = None if target.tls is None else load_certificates(target.tls, TlsRole.RANK).context

    def rest(seconds: float) -> None:
        check()
        time.sleep(seconds)

    dial_once, fault = partial(_dial_once, target, context), f"no rank listens at {target.address}"
    return until_connected(dial_once, fault, max_pause_s=MAX_PAUSE_S, clock=clock, sleep=rest)


def _dial_once(target: GrpcTarget, context: ssl.SSLContext | None) -> RankLink:
    with ExitStack() as unless_known:
        plain = unless_known.enter_context(socket.create_connection((target.host, target.port), timeout=DIAL_S))
        plain.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        plain.settimeout(HELLO_S)
        try:
            connection: Connection = plain
            if context is not None:
                connection = tls = TlsSocket(plain, context, target.tls_name or target.host)
                tls.shake_hands()
            connection.sendall(_proof_of(target))
            link = RankLink(connection, {FrameKind.AUTHENTICATED: 0, FrameKind.FAILED: MAX_JSON_BYTES})
            kind, payload = link.receive()
        except (EngineFatal, ssl.SSLError) as error:  # in TLS 1.3 the other end verifies last, and its alert is read in place of a frame
            raise _fault(target, error) from error
        if kind is FrameKind.FAILED:
            reason = read_json(RankFailure, payload).reason
            key, what = ("token", "the same token") if reason == WRONG_TOKEN else ("tls_dir", "certificates for the same name")
            raise ConfigError(key, f"{target.address} refuses this rank: {reason}", f"Give all ranks {what}.")
        link.wait_at_most(None)
        unless_known.pop_all()
        return link


def _fault(target: GrpcTarget, error: Exception) -> Exception:
    """What cannot pass by itself is a ConfigError."""
    if isinstance(error, OtherProtocol):
        return ConfigError("rendezvous", f"what listens at {target.address} is no rank: {error}", "Give the address of a rank's port.")
    cause = error if isinstance(error, ssl.SSLError) else error.__cause__
    ca = "" if target.tls is None else target.tls.ca
    fault = handshake_fault(cause, own="this rank", peer="the other rank", ca=ca) if isinstance(cause, ssl.SSLError) else ""
    if fault:
        remedy = "Give all ranks certificates of one authority, each for its host, or all for the name in tls_name."
        return ConfigError("tls_dir", f"{target.address}: {fault}", remedy)
    return ConnectionResetError(str(error))
