"""Tests what an operator reads from `headrace tls init`."""

from __future__ import annotations

from datetime import UTC, datetime, timedelta
from pathlib import Path

import pytest

from headrace.cli.admin.tls import init
from headrace.core.errors import ConfigError
from headrace.fleet.authority import CERTIFICATE_DAYS, init_site

pytestmark = pytest.mark.pure


def test_it_says_what_to_copy_where_and_what_to_run_there(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    site = tmp_path / "site"
    init(site, ["gpu1,10.0.0.7", "::1"])
    lines = [line.strip() for line in capsys.readouterr().out.splitlines()]
    assert f"ssh gpu1 mkdir -p -m 700 /etc/headrace/engine; scp {site}/engine-gpu1/* gpu1:/etc/headrace/engine/" in lines
    assert f"ssh ::1 mkdir -p -m 700 /etc/headrace/engine; scp {site}/engine---1/* [::1]:/etc/headrace/engine/" in lines
    assert "there: headrace engine MODEL --listen gpu1:7001 --tls-dir /etc/headrace/engine" in lines
    assert "there: headrace engine MODEL --listen [::1]:7001 --tls-dir /etc/headrace/engine" in lines
    assert f"ssh GATEWAY_HOST mkdir -p -m 700 /etc/headrace/gateway; scp {site}/gateway/* GATEWAY_HOST:/etc/headrace/gateway/" in lines
    assert f"{site}: the authority of this site. Keep {site}/authority.key on this machine." in lines


def test_a_second_run_says_what_was_kept_and_what_expires(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    site = tmp_path / "site"
    init_site(site, [["gpu1"]], now=datetime.now(UTC) - timedelta(days=CERTIFICATE_DAYS - 10))
    init(site, ["gpu1", "gpu2"])
    said = capsys.readouterr().out
    assert said.count("kept as it is") == 2
    assert said.count("made, valid until") == 1
    assert said.count("It expires in 9 days. Remove the folder, run this command again") == 2


def test_a_run_without_hosts_says_until_when_those_of_earlier_runs_are_valid(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    site = tmp_path / "site"
    init_site(site, [["gpu1", "10.0.0.7"]], [["gpu2"]], now=datetime.now(UTC) - timedelta(days=CERTIFICATE_DAYS - 10))
    (site / "engine-gpu1" / "tls.key").unlink()  # it was copied to its machine, and is not kept here
    (site / "engine-gpu3.new").mkdir()  # left by a run that was killed
    init(site)
    said = capsys.readouterr().out
    assert f"{site}/engine-gpu1: kept as it is, valid until" in said
    assert "It expires in 9 days. Remove the folder, run this command with --host gpu1,10.0.0.7, and copy it again" in said
    assert "It expires in 9 days. Remove the folder, run this command with --rank gpu2, and copy it again" in said
    assert "For each machine with engines" not in said


def test_a_host_with_a_port_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="--host: 'gpu1:7001' is neither a host's name nor an address"):
        init(tmp_path / "site", ["gpu1:7001"])
