"""Tests which sockets a host stands for, against the real system."""

from __future__ import annotations

import errno
import logging
import socket
from collections.abc import Iterator
from contextlib import contextmanager

import pytest

from headrace.wire import listening
from headrace.wire.listening import bound_sockets, close_all, listening_sockets, shown_address, shown_host

pytestmark = pytest.mark.socket

needs_ipv6 = pytest.mark.skipif(not socket.has_dualstack_ipv6(), reason="this machine has no IPv6")


@contextmanager
def listeners(host: str, port: int = 0, *, shares_port: bool = False) -> Iterator[list[socket.socket]]:
    sockets = listening_sockets(host, port, backlog=5, shares_port=shares_port)
    try:
        yield sockets
    finally:
        close_all(sockets)


@needs_ipv6
@pytest.mark.parametrize("host", ["::", "[::]", "::0", "0:0:0:0:0:0:0:0"])
def test_every_ipv6_address_is_every_address(host: str) -> None:
    with listeners(host) as (ipv6, ipv4):
        port = ipv6.getsockname()[1]
        assert [shown_address(each) for each in (ipv6, ipv4)] == [f"[::]:{port}", f"0.0.0.0:{port}"]
        for client in ("127.0.0.1", "::1"):
            listener = ipv6 if ":" in client else ipv4
            with socket.create_connection((client, port)), listener.accept()[0] as accepted:
                assert accepted.getpeername()[0] == client, "not ::ffff:127.0.0.1, which no network of trusted proxies has"


@needs_ipv6
@pytest.mark.parametrize("host", ["localhost", "LocalHost"])
def test_localhost_is_both_loopbacks_whatever_the_resolver_says(host: str, monkeypatch: pytest.MonkeyPatch) -> None:
    real = socket.getaddrinfo

    def resolve(name: str, *arguments: object, **options: object) -> object:
        assert name.lower() != "localhost", "a resolver may be wrong, and the name passes as loopback"
        return real(name, *arguments, **options)  # type: ignore[arg-type]

    monkeypatch.setattr(socket, "getaddrinfo", resolve)
    with listeners(host) as sockets:
        assert [each.getsockname()[0] for each in sockets] == ["127.0.0.1", "::1"]
        assert len({each.getsockname()[1] for each in sockets}) == 1


@pytest.mark.parametrize(("host", "is_named"), [("127.0.0.1", False), ("0.0.0.0", False)])
def test_an_ipv4_address_is_itself_alone(host: str, is_named: bool, caplog: pytest.LogCaptureFixture) -> None:
    with listeners(host) as sockets:
        assert [each.getsockname()[0] for each in sockets] == [host]
    assert not caplog.records


@pytest.mark.parametrize("code", [errno.EADDRNOTAVAIL, errno.EAFNOSUPPORT])
@pytest.mark.parametrize(("host", "left"), [("::", "0.0.0.0"), ("localhost", "127.0.0.1")])
def test_a_machine_without_ipv6_listens_by_ipv4_and_says_so(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, code: int, host: str, left: str
) -> None:
    real = listening._bind

    def bind(family: int, address: tuple[object, ...], shares_port: bool) -> socket.socket:
        if family == socket.AF_INET6:
            raise OSError(code, "no IPv6")
        return real(family, address, shares_port)

    monkeypatch.setattr(listening, "_bind", bind)
    with caplog.at_level(logging.WARNING), listeners(host) as sockets:
        assert [each.getsockname()[0] for each in sockets] == [left]
    assert f"this machine does not have ::{'1' * (host != '::')}: {host} is {left}:" in caplog.text
    with pytest.raises(OSError, match="no IPv6"):
        bound_sockets("::1", 0)


@needs_ipv6
def test_an_address_in_use_is_not_left_out() -> None:
    with listeners("127.0.0.1") as (taken,):
        port = taken.getsockname()[1]
        for host in ("::", "localhost"):
            with pytest.raises(OSError, match="Address already in use"):
                bound_sockets(host, port)


@needs_ipv6
def test_a_port_that_is_free_at_the_first_address_alone_is_not_chosen(monkeypatch: pytest.MonkeyPatch) -> None:
    real = listening._bind
    refused: list[object] = []

    def bind(family: int, address: tuple[object, ...], shares_port: bool) -> socket.socket:
        if family == socket.AF_INET6 and len(refused) < 3:
            refused.append(address)
            raise OSError(errno.EADDRINUSE, "in use")
        return real(family, address, shares_port)

    monkeypatch.setattr(listening, "_bind", bind)
    with listeners("localhost") as sockets:
        assert len({each.getsockname()[1] for each in sockets}) == 1
    assert len(refused) == 3


@needs_ipv6
def test_several_gateways_share_both_families() -> None:
    with listeners("::", shares_port=True) as first, listeners("::", first[0].getsockname()[1], shares_port=True) as second:
        assert [shown_address(each) for each in first] == [shown_address(each) for each in second]


@pytest.mark.parametrize("host", ["no such host", "a" * 70, "..", "a\0b", "[fe80::1%nosuch0]"])
def test_what_is_no_host_is_an_error_of_names(host: str) -> None:
    with pytest.raises(socket.gaierror):
        bound_sockets(host, 0)


@pytest.mark.pure
@pytest.mark.parametrize(
    ("host", "shown"),
    [("::1", "[::1]"), ("[::1]", "[::1]"), ("fe80::1%eth0", "[fe80::1%25eth0]"), ("10.0.0.7", "10.0.0.7"), ("a.b", "a.b")],
)
def test_a_host_in_a_url(host: str, shown: str) -> None:
    assert shown_host(host) == shown
