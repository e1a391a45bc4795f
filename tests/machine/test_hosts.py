"""Tests the recognition of addresses of this machine, of the link, and of a cloud's metadata service, however they are written."""

from __future__ import annotations

import pytest

from headrace.machine.hosts import is_link_local, is_loopback

pytestmark = pytest.mark.pure


@pytest.mark.parametrize(
    "host",
    [
        "169.254.169.254",
        "169.254.0.1",
        "fe80::1",
        "[fe80::1]",
        "fe80::1%eth0",
        "::ffff:169.254.169.254",
        "::ffff:a9fe:a9fe",
        "64:ff9b::a9fe:a9fe",
        "2002:a9fe:a9fe::",
        "::169.254.169.254",
        "64:ff9b:1::a9fe:a9fe",
        "2001:0:808:808::5601:5601",
        "fd00:ec2::254",
        "100.100.100.200",
        "168.63.129.16",
    ],
)
def test_link_local_and_metadata_addresses(host: str) -> None:
    assert is_link_local(host)
    assert not is_loopback(host)


@pytest.mark.parametrize(
    "host", ["127.0.0.1", "::1", "10.0.0.5", "8.8.8.8", "2001:db8::1", "64:ff9b::808:808", "::8.8.8.8", "example.com", "", "169.254"]
)
def test_other_hosts_are_not_link_local(host: str) -> None:
    assert not is_link_local(host)
