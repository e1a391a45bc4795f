"""Tests that the example of two pools stays one: its files are read as its processes read them, and fit each other."""

from __future__ import annotations

import runpy
import shutil
import subprocess
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import pytest

from headrace.bundled import bundled_path
from headrace.cli.config.load import load
from headrace.cli.config.sections import ServeConfig
from headrace.cli.servers.gateway import check_no_engines
from tests.house.reader import ROOT

pytestmark = pytest.mark.pure

EXAMPLE = ROOT / "examples" / "two_pools"


@pytest.fixture(scope="module")
def start() -> dict[str, Any]:
    """What start.py defines."""
    return runpy.run_path(str(EXAMPLE / "start.py"))


@pytest.fixture(scope="module")
def config() -> ServeConfig:
    return load(EXAMPLE / "gateway.yaml", {})


def test_gateways_reach_the_engines_and_the_redis_that_are_started(start: dict[str, Any], config: ServeConfig) -> None:
    check_no_engines(config)
    named = {
        replica.name: (section.remote.model, replica.address)
        for section in config.models
        if section.remote is not None
        for replica in section.remote.replicas
    }
    assert named == {name: (model, f"127.0.0.1:{port}") for name, (model, port) in start["ENGINES"].items()}
    assert urlsplit(config.gateway.store.url).port == start["REDIS_PORT"]
    assert {section.served_name for section in config.models} == set(config.prices)


def test_the_pools_differ_in_size(config: ServeConfig) -> None:
    sizes = [
        sum(file.stat().st_size for file in folder.glob("*.safetensors"))
        for section in config.models
        if section.remote is not None and (folder := bundled_path(section.remote.model)) is not None
    ]
    assert len(sizes) == 2
    assert sizes[0] > 5 * sizes[1]


@pytest.mark.process
def test_haproxy_takes_the_shipped_file_with_the_addresses_of_the_example(start: dict[str, Any], tmp_path: Path) -> None:
    if shutil.which("haproxy") is None:
        pytest.skip("HAProxy is not installed: run `make servers`")
    start["prepare"](tmp_path)
    done = subprocess.run(["haproxy", "-c", "-f", "haproxy.cfg"], cwd=tmp_path, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    text = (tmp_path / "haproxy.cfg").read_text(encoding="utf-8")
    assert [text.count(f"127.0.0.1:{port}\n") for port in (*start["GATEWAYS"].values(), start["PORT"])] == [1, 1, 1]
