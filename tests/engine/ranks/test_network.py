"""Tests the way between ranks on several machines: what is let in after TLS and token, what is refused and why, and frames over TLS."""

from __future__ import annotations

import logging
import os
import socket
import ssl
import threading
from collections.abc import Callable, Iterator
from contextlib import ExitStack, closing, suppress
from dataclasses import replace
from pathlib import Path

import pytest
from tls_kit import LONG_AGO, TOKEN, authority, write_certificates

from headrace.core.errors import ConfigError, EngineFatal
from headrace.engine.ranks import network
from headrace.engine.ranks.frames import HEADER, MAGIC, FrameKind, RankFailure, RankHello, frame, int_frame, json_frame
from headrace.engine.ranks.link import RankLink, gather
from headrace.engine.ranks.network import RankPort, TlsSocket, dial
from headrace.wire.target import GrpcTarget, parse_target
from headrace.wire.tls.files import TlsRole, load_certificates

pytestmark = pytest.mark.socket
HOST, SITE, OTHER_SITE = "127.0.0.1", authority(), authority()
BEATS = {FrameKind.BEAT: 0, FrameKind.HIDDEN: 1 << 20}
Make = Callable[..., GrpcTarget]


@pytest.fixture
def make(tmp_path: Path) -> Make:
    """A target with certificates of its own."""

    def made(name: str = "a", *, role: TlsRole = TlsRole.RANK, signer: object = SITE, port: int = 0, **how: object) -> GrpcTarget:
        files = write_certificates(tmp_path / name, signer, role, HOST, **how)  # type: ignore[arg-type]
        return parse_target(f"{HOST}:{port}", TOKEN, files)

    return made


def at(target: GrpcTarget, port: RankPort) -> GrpcTarget:
    return replace(target, address=port.address)


def first(port: RankPort) -> RankLink:
    return RankLink(next(port.connections()), BEATS)


@pytest.mark.parametrize("is_secure", [True, False], ids=["TLS", "loopback without"])
def test_what_shows_certificate_and_token_is_let_in(make: Make, is_secure: bool) -> None:
    target = make() if is_secure else parse_target(f"{HOST}:0", TOKEN)
    with ExitStack() as ending:
        port = ending.enter_context(closing(RankPort(target)))
        mine = ending.enter_context(closing(dial(at(make("b") if is_secure else target, port))))
        theirs = ending.enter_context(closing(first(port)))
        mine.send(frame(FrameKind.BEAT))
        assert theirs.receive()[0] is FrameKind.BEAT
        theirs.send(int_frame(FrameKind.COPY, 1))
        mine.allowed = {FrameKind.COPY: 8}
        assert mine.receive()[0] is FrameKind.COPY
        assert not theirs.is_closed()
        mine.shut()
        with pytest.raises(EngineFatal, match="its link is closed"):
            theirs.receive()
        assert theirs.is_closed()


REFUSED = {
    "another authority": (
        {"signer": OTHER_SITE}, "tls_dir: .*the other rank's certificate was not signed by the authority", "refused this rank's certificate"
    ),
    "not for clients": ({"role": TlsRole.ENGINE}, "tls_dir: .*is for another role", ""),
    "expired": ({"now": LONG_AGO}, "tls_dir: .*the other rank refused this rank's certificate: it has expired", "has expired"),
}  # fmt: skip


@pytest.mark.parametrize(("how", "why", "logged"), REFUSED.values(), ids=REFUSED)
def test_a_wrong_certificate_is_refused_by_name_at_both_ends(
    make: Make, how: dict[str, object], why: str, logged: str, caplog: pytest.LogCaptureFixture
) -> None:
    with closing(RankPort(make())) as port:
        with pytest.raises(ConfigError, match=why):
            dial(at(make("b", **how), port))
        with closing(dial(at(make("c"), port))), closing(first(port)):
            assert logged in caplog.text


def test_a_certificate_of_another_host_is_not_talked_to(tmp_path: Path, make: Make) -> None:
    elsewhere = parse_target(f"{HOST}:0", TOKEN, write_certificates(tmp_path / "e", SITE, TlsRole.RANK, "gpu9"))
    with closing(RankPort(elsewhere)) as port, pytest.raises(ConfigError, match="certificate is refused: IP address mismatch"):
        dial(at(make(), port))


def test_ranks_that_show_one_certificate_know_each_other_by_the_name_that_it_has(tmp_path: Path) -> None:
    """Pods of a Service, whose addresses and host names no certificate has."""
    shared = parse_target(f"{HOST}:0", TOKEN, write_certificates(tmp_path, SITE, TlsRole.RANK, "engines.llm.svc"))
    with closing(RankPort(shared)) as port:
        with closing(dial(replace(at(shared, port), tls_name="engines.llm.svc"))), closing(first(port)):
            pass
        for name in ("", "engines.other.svc"):
            with pytest.raises(ConfigError, match=f"certificate is refused: .* mismatch, certificate is not valid for '{name or HOST}'"):
                dial(replace(at(shared, port), tls_name=name))


def test_a_port_that_nothing_listens_at_is_dialled_less_and_less(make: Make, monkeypatch: pytest.MonkeyPatch) -> None:
    """The name server of a cluster is not asked ten times a second for ten minutes."""
    pauses = [0.0]
    monkeypatch.setattr("headrace.engine.ranks.network.time.sleep", pauses.append)
    with closing(RankPort(make())) as port:
        gone = at(make("b"), port)
    with pytest.raises(EngineFatal, match=r"no rank listens at .* after 600 s"):
        dial(gone, clock=lambda: sum(pauses))
    assert (pauses[1], set(pauses[6:])) == (0.1, {2.0})


STRANGERS = {"another deployment's rank": (TlsRole.RANK, "other.llm.svc"), "a gateway": (TlsRole.GATEWAY, "gateway")}


@pytest.mark.parametrize(("role", "name"), STRANGERS.values(), ids=STRANGERS)
def test_of_one_site_only_ranks_with_the_shared_name_are_let_in(
    tmp_path: Path, role: TlsRole, name: str, caplog: pytest.LogCaptureFixture
) -> None:
    """They have the site's authority and token, as every gateway and every engine has."""
    own, stranger = (write_certificates(tmp_path / each, SITE, of, each) for of, each in ((TlsRole.RANK, "engines.llm.svc"), (role, name)))
    target = replace(parse_target(f"{HOST}:0", TOKEN, own), tls_name="engines.llm.svc")
    why = "its certificate is not for engines.llm.svc"
    with closing(RankPort(target)) as port:
        with pytest.raises(ConfigError, match=f"tls_dir: .* refuses this rank: {why}. Give all ranks certificates for the same name"):
            dial(replace(at(target, port), tls=stranger))
        with closing(dial(at(target, port))), closing(first(port)):
            assert f"refused a connection from {HOST}: {why}" in caplog.text


@pytest.mark.parametrize("name", ["Engines.llm.svc", "*.llm.svc"])
def test_a_shared_name_is_read_as_openssl_reads_it(tmp_path: Path, name: str) -> None:
    target = parse_target(f"{HOST}:0", TOKEN, write_certificates(tmp_path, SITE, TlsRole.RANK, name))
    target = replace(target, tls_name="engines.LLM.svc")
    with closing(RankPort(target)) as port, closing(dial(at(target, port))), closing(first(port)):
        pass


def test_a_wrong_token_is_refused_at_both_ends_and_nothing_else_is_read(make: Make, caplog: pytest.LogCaptureFixture) -> None:
    with closing(RankPort(make())) as port:
        with pytest.raises(ConfigError, match=r"token: .* refuses this rank: its token is missing or wrong. Give all ranks the same"):
            dial(replace(at(make("b"), port), token="y" * 16))
        with closing(dial(at(make("c"), port))), closing(first(port)):
            assert "refused a connection from 127.0.0.1: its token is missing or wrong" in caplog.text


def raw(port: RankPort) -> socket.socket:
    host, _, number = port.address.rpartition(":")
    return socket.create_connection((host, int(number)), timeout=60)


UNKNOWN = [
    b"GET / HTTP/1.1\r\n\r\n",
    HEADER.pack(MAGIC, FrameKind.HELLO, 1 << 60),
    json_frame(FrameKind.HELLO, RankHello(1, {})),
    b"\x16\x03\x01",
]


@pytest.mark.parametrize("said", [*UNKNOWN, b""])
@pytest.mark.parametrize("is_secure", [True, False], ids=["TLS", "loopback without"])
def test_no_frame_of_an_unknown_sender_is_read(make: Make, said: bytes, is_secure: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """Whatever it says, it is no connection for `gather`; and it is closed."""
    read: list[object] = []
    monkeypatch.setattr(network, "RankLink", lambda *given: read.append(given))
    target = make() if is_secure else parse_target(f"{HOST}:0", TOKEN)
    with closing(RankPort(target)) as port, raw(port) as stranger:
        stranger.sendall(said)
        stranger.shutdown(socket.SHUT_WR)
        with suppress(ConnectionResetError):  # closed before all was read
            while stranger.recv(1 << 16):
                pass
        assert port._known.empty()
    assert not read


def test_one_that_is_slow_is_closed_however_often_it_says_something(make: Make, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(network, "HELLO_S", 0.05)
    with closing(RankPort(parse_target(f"{HOST}:0", TOKEN))) as port, raw(port) as slow:
        slow.sendall(b"x")
        assert slow.recv(1) == b""


def test_connections_that_say_nothing_are_limited_in_number_and_hold_up_no_other(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(network, "MAX_HANDSHAKES", 3)
    target = parse_target(f"{HOST}:0", TOKEN)
    with ExitStack() as ending:
        port = ending.enter_context(closing(RankPort(target)))
        silent = [ending.enter_context(raw(port)) for _ in range(2)]
        with closing(dial(at(target, port))), closing(first(port)):
            pass
        for _ in range(2):
            ending.enter_context(raw(port))
        assert silent[0].recv(1) == b"", "the oldest, and not the newest, which may be a rank"
        assert "3 later connections have not shown a token yet" in caplog.text
        with closing(dial(at(target, port), _fail)), closing(first(port)):
            assert silent[1].recv(1) == b""


def test_a_closed_port_leaves_no_connection_behind(make: Make) -> None:
    target = parse_target(f"{HOST}:0", TOKEN)
    port = RankPort(target)
    with closing(dial(at(target, port))) as link:
        port.close()
        with pytest.raises(EngineFatal, match="its link is closed"):
            link.receive()
    with pytest.raises(ConnectionRefusedError):
        raw(port)


def test_a_taken_address_is_refused_by_name() -> None:
    target = parse_target(f"{HOST}:0", TOKEN)
    with closing(RankPort(target)) as port, pytest.raises(ConfigError, match=r"rendezvous: cannot listen at .* \(Address already in use\)"):
        RankPort(at(target, port))


def test_a_dialling_rank_may_be_told_to_stop(monkeypatch: pytest.MonkeyPatch) -> None:
    with socket.create_server((HOST, 0)) as taken:
        number = taken.getsockname()[1]

    def check() -> None:
        raise EngineFatal("rank 0: its link is closed")

    with pytest.raises(EngineFatal, match="rank 0"):
        dial(parse_target(f"{HOST}:{number}", TOKEN), check)


def tls_pair(target: GrpcTarget) -> tuple[TlsSocket, TlsSocket]:
    """The end that dialled first."""
    assert target.tls is not None
    ends = socket.socketpair()
    client = TlsSocket(ends[0], load_certificates(target.tls, TlsRole.RANK).context, HOST)
    server = TlsSocket(ends[1], load_certificates(target.tls, TlsRole.ENGINE).context)
    shaking = threading.Thread(target=server.shake_hands, daemon=True)
    shaking.start()
    client.shake_hands()
    shaking.join(60)
    return client, server


def test_large_frames_of_several_senders_go_both_ways_at_once_over_tls(make: Make) -> None:
    ends = [RankLink(each, BEATS) for each in tls_pair(make())]
    payloads = [os.urandom(n) for n in (1, 16 << 10, (1 << 20) - 7, 1 << 20)] * 3
    found: list[list[bytes]] = [[], []]

    def read(number: int) -> None:
        while len(found[number]) < 2 * len(payloads):
            found[number].append(bytes(ends[number].receive()[1]))

    def send(number: int) -> None:
        for each in payloads:
            ends[number].send(HEADER.pack(MAGIC, FrameKind.HIDDEN, len(each)) + each)

    threads = [threading.Thread(target=work, args=(number,), daemon=True) for work in (read, send, send) for number in (0, 1)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    for link in ends:
        link.close()
    for mine in found:
        assert sorted(mine) == sorted(2 * payloads)


def test_a_record_that_was_changed_on_the_way_closes_the_link(make: Make) -> None:
    client, server = tls_pair(make())
    link = RankLink(server, BEATS)
    client._tls.write(frame(FrameKind.BEAT))
    record = bytearray(client._outgoing.read())
    record[-1] ^= 1
    client._plain.sendall(record)
    with pytest.raises(EngineFatal, match="its link is closed"):
        link.receive()
    client.close()
    link.close()


def test_frames_that_have_not_come_are_not_waited_for_over_tls(make: Make) -> None:
    client, server = tls_pair(make())
    link, mine = RankLink(server, BEATS), RankLink(client, {})
    assert list(link.arrived()) == []
    mine.send(frame(FrameKind.BEAT) * 2)
    assert [kind for kind, _ in link.arrived()] == [FrameKind.BEAT] * 2
    mine.send(HEADER.pack(MAGIC, FrameKind.HIDDEN, 1 + (1 << 20)))
    with pytest.raises(EngineFatal, match="HIDDEN has 1048577 bytes, more than 1048576"):
        list(link.arrived())
    mine.close()
    link.close()


def test_ranks_gather_over_tls_and_a_strangers_hello_is_answered_with_why(make: Make) -> None:
    with ExitStack() as ending:
        port = ending.enter_context(closing(RankPort(make())))

        def join(hello: RankHello, name: str) -> Iterator[RankLink]:
            link = dial(at(make(name), port))
            ending.callback(link.close)
            link.send(json_frame(FrameKind.HELLO, hello))
            yield link

        [refused] = join(RankHello(7, {}), "b")
        [_] = join(RankHello(1, {}, "machine", "gpu2:7"), "c")
        links = gather(port.connections(), 2, {})
        ending.callback(links[1].close)
        assert (links[1].hello.machine, links[1].hello.address) == ("machine", "gpu2:7")
        refused.allowed = {FrameKind.FAILED: 1 << 16}
        assert b"rank 7 is refused" in refused.receive()[1]


def test_logs_name_an_end_without_tls(make: Make, caplog: pytest.LogCaptureFixture) -> None:
    with closing(RankPort(make())) as port, raw(port) as plain, caplog.at_level(logging.WARNING):
        plain.sendall(b"x" * 100)
        with suppress(ConnectionResetError):
            while plain.recv(1 << 16):
                pass
        with closing(dial(at(make("b"), port))), closing(first(port)):
            assert "the other rank does not speak TLS" in caplog.text


def test_a_port_that_answers_with_another_frame_is_not_joined() -> None:
    ends = socket.create_server((HOST, 0))

    def lie() -> None:
        accepted, _ = ends.accept()
        with accepted:
            accepted.recv(32)
            accepted.sendall(json_frame(FrameKind.SIZES, RankFailure("x", False)))
            accepted.recv(1)

    threading.Thread(target=lie, daemon=True).start()
    with ends, pytest.raises(EngineFatal, match="again"):
        dial(parse_target(f"{HOST}:{ends.getsockname()[1]}", TOKEN), check=_fail)


def test_what_is_no_rank_is_named_at_once() -> None:
    ends = socket.create_server((HOST, 0))

    def answer() -> None:
        accepted, _ = ends.accept()
        with accepted:
            accepted.recv(32)
            accepted.sendall(b"HTTP/1.1 400 Bad Request\r\n\r\n")
            accepted.recv(1)

    threading.Thread(target=answer, daemon=True).start()
    with ends, pytest.raises(ConfigError, match=r"rendezvous: what listens at .* is no rank: a frame begins with b'HTTP'"):
        dial(parse_target(f"{HOST}:{ends.getsockname()[1]}", TOKEN), check=_fail)


def _fail() -> None:
    raise EngineFatal("again")


def test_contexts_want_the_newest_tls_and_a_certificate(make: Make) -> None:
    tls = make().tls
    assert tls is not None
    for role in (TlsRole.RANK, TlsRole.ENGINE):
        context = load_certificates(tls, role).context
        assert (context.verify_mode, context.minimum_version) == (ssl.CERT_REQUIRED, ssl.TLSVersion.TLSv1_3)
