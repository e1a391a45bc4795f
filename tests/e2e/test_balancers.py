"""Tests HAProxy and nginx, with the files that are shipped, in front of two gateways: 200 streams, a drain, a restart, sessions, models,
TLS.
"""

from __future__ import annotations

import os
import shutil
import subprocess

import pytest

from bench.storms import balancers
from tests.house.reader import ROOT

STREAMS = 200
INSTALL_S = 240

pytestmark = [pytest.mark.process, pytest.mark.slow, pytest.mark.timeout(900)]


@pytest.fixture(scope="module", autouse=True)
def installed() -> None:
    if all(map(shutil.which, balancers.BALANCERS)):
        return
    if os.geteuid() != 0 or shutil.which("apt-get") is None:
        pytest.skip("HAProxy or nginx is not installed: run `make servers` as root on a Debian or Ubuntu")
    subprocess.run([ROOT / "tools" / "install_debian.sh", "haproxy", "nginx"], check=True, timeout=INSTALL_S)


@pytest.mark.parametrize("name", balancers.BALANCERS)
def test_no_stream_is_cut_and_no_request_fails_while_a_gateway_is_drained_and_started_again(name: str) -> None:
    found = balancers.run([name], STREAMS)
    assert list(balancers.broken_promises(found)) == []
    assert found[name]["streams"] == 2 * STREAMS
    assert found[name]["short"] > 100
