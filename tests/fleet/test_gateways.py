"""Tests reserving an address to listen on, against the real system, and what several gateways see of a replica."""

from __future__ import annotations

import socket

import pytest

from headrace.core.errors import ConfigError
from headrace.core.load import AttemptCounts
from headrace.fleet.gateways import GatewaysView, check_can_listen, reserved_port
from headrace.wire.leash import ModelStatus, ReplicaStatus, ReportedReplicaLoad

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


def seen(age_s: float, num_tokens: int, **counts: int) -> ReplicaStatus:
    load = ReportedReplicaLoad(num_running=1, num_waiting=0, fill=0.5, num_finished=3, num_tokens=num_tokens, age_s=age_s)
    return ReplicaStatus(True, "", 0, load=load, attempts=AttemptCounts(**counts))


@pytest.mark.pure
def test_of_several_gateways_the_freshest_report_counts_and_attempts_are_summed() -> None:
    first = {"fox": ModelStatus({"fox-0": seen(2.0, 90, num_sent=5, num_lost=1)})}
    second = {"fox": ModelStatus({"fox-0": seen(0.5, 95, num_sent=3, num_begun=2), "fox-1": ReplicaStatus(False, "not connected", 0)})}
    view = GatewaysView([first, second, {}])
    assert (load := view.load("fox", "fox-0")) is not None
    assert load.num_tokens == 95
    assert view.attempts("fox", "fox-0") == AttemptCounts(num_sent=8, num_lost=1, num_begun=2)
    assert view.load("fox", "fox-1") is None
    assert view.attempts("owl", "owl-0") == AttemptCounts()
