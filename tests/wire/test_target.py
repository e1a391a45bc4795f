"""Tests the addresses at which an engine may listen, and the gateways that may call it."""

from __future__ import annotations

import asyncio
import socket
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any

import pytest
from patience import PATIENCE_S

from headrace.core.errors import ConfigError
from headrace.wire import dial
from headrace.wire import target as target_module
from headrace.wire.dial import Dialer
from headrace.wire.target import TOKEN_METADATA, GrpcTarget, nothing_listens, parse_target, token_matches

pytestmark = pytest.mark.socket

TOKEN = "0123456789abcdef"


@pytest.fixture(autouse=True)
def patient(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(target_module, "LISTENS_S", PATIENCE_S)


@pytest.mark.pure
@pytest.mark.parametrize("address", ["unix:/tmp/x.sock", "127.0.0.1:0", "localhost:8", "[::1]:80", "127.8.8.8:1"])
def test_unix_sockets_and_loopback_with_a_token_are_fine(address: str) -> None:
    assert parse_target(address, TOKEN).address == address


@pytest.mark.pure
@pytest.mark.parametrize(
    ("address", "token", "word"),
    [
        ("unix:relative.sock", None, "absolute"),
        ("unix:/" + "x" * 120, None, "bytes"),
        ("127.0.0.1:80", None, "token"),
        ("127.0.0.1:80", "short", "characters"),
        ("0.0.0.0:80", TOKEN, "loopback"),
        ("10.0.0.1:80", TOKEN, "loopback"),
        ("example.org:80", TOKEN, "loopback"),
        ("[::]:80", TOKEN, "loopback"),
        ("localhost.example.org:80", TOKEN, "loopback"),
        ("127.0.0.1", TOKEN, "host:port"),
        ("127.0.0.1:99999", TOKEN, "host:port"),
        ("dns:///127.0.0.1:80", TOKEN, "neither a host"),
        ("::1:80", TOKEN, "brackets"),
    ],
)
def test_what_the_wire_does_not_do_is_refused_by_name(address: str, token: str | None, word: str) -> None:
    with pytest.raises(ConfigError, match=word):
        parse_target(address, token)


@pytest.mark.pure
def test_a_token_must_match_whole() -> None:
    assert token_matches([(TOKEN_METADATA, TOKEN)], TOKEN)
    assert token_matches([(TOKEN_METADATA, TOKEN.encode())], TOKEN)
    assert token_matches([], None)
    for metadata in ([], [(TOKEN_METADATA, "")], [(TOKEN_METADATA, TOKEN + "x")], [("other", TOKEN)], [(TOKEN_METADATA, TOKEN[:-1])]):
        assert not token_matches(metadata, TOKEN)


@pytest.mark.parametrize("where", [None, "127.0.0.1", "127.0.0.2"])
async def test_nothing_listens_where_each_address_of_a_name_refuses(where: str | None, monkeypatch: pytest.MonkeyPatch) -> None:
    """`localhost` has two addresses on most machines, and asyncio names no class of error when both refuse."""

    async def both(_host: str, port: int, **_: Any) -> list[Any]:
        return [(socket.AF_INET, socket.SOCK_STREAM, 6, "", (address, port)) for address in ("127.0.0.1", "127.0.0.2")]

    monkeypatch.setattr(asyncio.get_running_loop(), "getaddrinfo", both)
    with socket.create_server((where, 0)) if where is not None else bound_at_both() as server:
        port = server.getsockname()[1]
        assert await nothing_listens(parse_target(f"localhost:{port}", TOKEN)) is (where is None)


@contextmanager
def bound_at_both() -> Iterator[socket.socket]:
    """A socket that does not listen, at a port of 127.0.0.1 that is kept from others at 127.0.0.2 too."""
    while True:
        with socket.socket() as one, socket.socket() as other:
            one.bind(("127.0.0.1", 0))
            try:
                other.bind(("127.0.0.2", one.getsockname()[1]))
            except OSError:  # another process has it
                continue
            yield one
            return


async def test_a_network_that_drops_packets_is_not_waited_for(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(target_module, "LISTENS_S", 0.05)
    with socket.create_server(("127.0.0.1", 0), backlog=0) as server:
        port = server.getsockname()[1]
        filling = [socket.socket() for _ in range(4)]  # a full backlog takes no further connection, and refuses none
        for each in filling:
            each.setblocking(False)
            each.connect_ex(("127.0.0.1", port))
        async with asyncio.timeout(PATIENCE_S):
            assert not await nothing_listens(parse_target(f"127.0.0.1:{port}", TOKEN))
        for each in filling:
            each.close()


async def test_a_name_that_is_none_is_no_place_where_nothing_listens() -> None:
    target = GrpcTarget(f"{'a' * 70}:7001", None, TOKEN)  # a part of a name has 63 characters at most
    assert not await nothing_listens(target)
    assert await Dialer(target).find_tls_fault() == ""


async def test_a_fault_that_takes_long_to_find_is_left(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(dial, "LOOK_S", 0.05)
    is_over = threading.Event()
    dialer = Dialer(parse_target("127.0.0.1:1", TOKEN))
    monkeypatch.setattr(dialer, "_repeat_handshake", partial(is_over.wait, PATIENCE_S))
    assert await dialer.find_tls_fault() == ""
    is_over.set()


async def test_nothing_listens_at_a_socket_that_is_missing_or_refuses(tmp_path: Path) -> None:
    path = tmp_path / "x.sock"
    target = parse_target(f"unix:{path}")
    assert await nothing_listens(target)
    with socket.socket(socket.AF_UNIX) as server:
        server.bind(str(path))
        assert await nothing_listens(target)
        server.listen()
        assert not await nothing_listens(target)
