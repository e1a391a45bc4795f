"""Tests what is said where no Ray cluster can be joined. Ray itself is in tests/e2e/test_ray_nodes.py."""

from __future__ import annotations

import pwd
from pathlib import Path
from types import SimpleNamespace

import pytest

from headrace.core.errors import ConfigError
from headrace.fleet.ray import cluster
from headrace.fleet.ray.cluster import RayCluster
from headrace.fleet.ray.options import RayOptions

pytestmark = pytest.mark.pure

VARIABLES = ("RAY_AUTH_MODE", "RAY_AUTH_TOKEN", "RAY_AUTH_TOKEN_PATH")


@pytest.fixture(autouse=True)
def unreachable(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """As Ray says it of a cluster whose token a program does not send."""

    def init(**_: object) -> None:
        raise ConnectionError("ray client connection timeout")

    monkeypatch.setattr(cluster, "ray_package", lambda: SimpleNamespace(init=init))
    monkeypatch.setenv("HOME", str(tmp_path))
    for name in VARIABLES:
        monkeypatch.delenv(name, raising=False)


def refusal() -> str:
    with pytest.raises(ConfigError) as caught:
        RayCluster(RayOptions(address="head:6379"))
    return str(caught.value)


def test_without_a_token_the_address_is_named() -> None:
    assert refusal().startswith("ray.address: no cluster can be used at 'head:6379': ray client connection timeout. Start one")


@pytest.mark.parametrize("variable", VARIABLES[1:])
def test_a_token_in_the_environment_that_ray_does_not_send_is_named(monkeypatch: pytest.MonkeyPatch, variable: str) -> None:
    monkeypatch.setenv(variable, "secret")
    assert f"Set RAY_AUTH_MODE=token if the cluster wants a token: Ray has one ({variable}), and does not send it." in refusal()
    assert "secret" not in refusal()
    monkeypatch.setenv("RAY_AUTH_MODE", "token")
    assert "RAY_AUTH_MODE" not in refusal()


def test_without_a_home_the_address_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    def unknown(_: int) -> None:
        raise KeyError

    monkeypatch.delenv("HOME")
    monkeypatch.setattr(pwd, "getpwuid", unknown)
    assert refusal().startswith("ray.address: no cluster can be used at 'head:6379'")


def test_a_token_in_the_users_home_that_ray_does_not_send_is_named(tmp_path: Path) -> None:
    (tmp_path / ".ray").mkdir()
    (tmp_path / ".ray" / "auth_token").write_text("secret")
    assert f"RAY_AUTH_MODE=token if the cluster wants a token: Ray has one ({tmp_path}/.ray/auth_token)" in refusal()
