"""Tests reserving an address to listen on, against the real system."""

from __future__ import annotations

import socket

import pytest

from headrace.core.errors import ConfigError
from headrace.fleet.gateways import check_can_listen, reserved_port

pytestmark = pytest.mark.socket


def test_a_free_port_can_be_taken_by_the_gateway_right_after() -> None:
    check_can_listen("127.0.0.1", 0)
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = server.getsockname()[1]
        with pytest.raises(ConfigError, match=rf"port {port} on 127.0.0.1 is in use"):
            check_can_listen("127.0.0.1", port)
    check_can_listen("127.0.0.1", port)
    socket.create_server(("127.0.0.1", port)).close()


def test_connections_of_a_server_that_left_do_not_count() -> None:
    with socket.create_server(("127.0.0.1", 0)) as server, socket.create_connection(server.getsockname()) as client:
        port = server.getsockname()[1]
        accepted, _ = server.accept()
        accepted.close()  # first, so that this side is left in TIME_WAIT
        assert client.recv(1) == b""
    check_can_listen("127.0.0.1", port)


@pytest.mark.parametrize("host", ["203.0.113.7", "no such host"])
def test_a_host_that_is_not_ours_is_named(host: str) -> None:
    with pytest.raises(ConfigError, match=r"gateway\.host") as caught:
        check_can_listen(host, 0)
    assert host in str(caught.value)


def test_a_reserved_port_is_shared_by_gateways_and_refused_to_other_servers() -> None:
    with reserved_port("127.0.0.1", 0) as port:
        with pytest.raises(ConfigError, match=rf"port {port} on 127.0.0.1 is in use"):
            check_can_listen("127.0.0.1", port)
        with pytest.raises(OSError, match="Address already in use"):
            socket.create_server(("127.0.0.1", port))
        gateways = [socket.create_server(("127.0.0.1", port), reuse_port=True) for _ in range(2)]
        for gateway in gateways:
            gateway.close()
        with pytest.raises(ConfigError, match="is in use"), reserved_port("127.0.0.1", port):
            pytest.fail("another deployment would share the port")
    check_can_listen("127.0.0.1", port)


def test_a_port_that_another_server_shares_is_refused() -> None:
    with socket.create_server(("127.0.0.1", 0), reuse_port=True) as server:
        port = server.getsockname()[1]
        with pytest.raises(ConfigError, match="is in use"):
            reserved_port("127.0.0.1", port).__enter__()
