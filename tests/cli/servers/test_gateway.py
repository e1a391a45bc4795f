"""Tests `headrace gateway` started by hand: how its flags and its file are used, and what is refused before it starts."""

from __future__ import annotations

import asyncio
import os
import signal
import sys
import threading
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import yaml
from local_workers import LocalWorkers

from headrace.cli.admin.tls import init
from headrace.cli.exits import CommandExitCode
from headrace.cli.main import main
from headrace.core.errors import ConfigError
from headrace.fleet.config import FleetConfig
from headrace.fleet.kubernetes.service import KubernetesService
from headrace.gateway.config import GatewayConfig
from headrace.gateway.text_host import TextContext
from headrace.gateway.upstream.model_config import ReplicaConfig
from headrace.machine.signals import StopSignals, on_hangup
from headrace.observe.logs import ENVIRONMENT
from tests.cli.conftest import Headrace

pytestmark = pytest.mark.pure

Run = Callable[..., GatewayConfig]
again: list[Callable[[], GatewayConfig] | None] = []
"""How each gateway that was started would read its configuration again, the latest one last."""

TCP = "10.0.0.7:7001"


@pytest.fixture
def configured(monkeypatch: pytest.MonkeyPatch) -> Iterator[Run]:
    """What the gateway would be started with."""

    def run(*arguments: str) -> GatewayConfig:
        started: list[GatewayConfig] = []

        def run_gateway(read: Callable[[], GatewayConfig], *, read_again: Callable[[], GatewayConfig] | None) -> int:
            started.append(read())
            again.append(read_again)
            return 0

        monkeypatch.setattr("headrace.gateway.process.run_gateway", run_gateway)
        monkeypatch.setattr(sys, "argv", ["headrace", "gateway", *arguments])
        with pytest.raises(SystemExit) as ended:
            main()
        assert ended.value.code == 0
        return started[0]

    yield run
    signal.pthread_sigmask(signal.SIG_UNBLOCK, {signal.SIGHUP})  # the command holds it back, and here no gateway takes it


def test_flags_name_the_engines_and_this_gateways_certificates(configured: Run, model_folder: Path, tmp_path: Path) -> None:
    flags = ["--replica", f"one={TCP}", "--replica", "two=unix:/run/e.sock", "--tls-dir", str(tmp_path)]
    config = configured(str(model_folder), *flags, "--port", "0", "--served-model-name", "a", "b", "--drain-timeout", "0")
    [model] = config.models
    assert model.replicas == (
        ReplicaConfig(name="one", address=TCP, tls_dir=str(tmp_path)),
        ReplicaConfig(name="two", address="unix:/run/e.sock", token_file=str(tmp_path / "token")),
    )
    assert (model.name, model.aliases, model.folder) == ("a", ("b",), str(model_folder))
    assert (config.port, config.timeouts.drain_s) == (0, 0.1)


def test_a_file_is_read_as_serve_reads_it_and_flags_win(configured: Run, model_folder: Path, tmp_path: Path) -> None:
    remote = {"model": str(model_folder), "replicas": [{"name": "one", "address": "unix:/run/e.sock"}]}
    foreign = {"name": "far", "upstreams": [{"url": "http://127.0.0.1:9/v1"}]}
    file = tmp_path / "headrace.yaml"
    file.write_text(yaml.safe_dump({"models": [{"remote": remote}, foreign], "gateway": {"port": 9000}}))
    config = configured("--config", str(file), "--port", "9001")
    assert [model.name for model in config.models] == [model_folder.name, "far"]
    assert config.port == 9001


def test_a_file_is_read_again_with_the_flags_and_the_environment_of_the_start(
    configured: Run, model_folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HEADRACE_GATEWAY__API_KEYS__0__KEY", "a-secret-key")
    monkeypatch.delenv(ENVIRONMENT, raising=False)  # a gateway that was started in this process leaves it to its children
    replicas = [{"name": "one", "address": "unix:/run/e.sock"}]
    remote = {"model": str(model_folder), "replicas": replicas}
    file = tmp_path / "headrace.yaml"
    file.write_text(yaml.safe_dump({"models": [{"remote": remote}], "gateway": {"port": 9000}}))
    first = configured("--config", str(file), "--port", "9001")
    read_again = again[-1]
    assert read_again is not None
    assert read_again() == first
    replicas.append({"name": "two", "address": "unix:/run/f.sock"})
    file.write_text(yaml.safe_dump({"models": [{"remote": remote}], "gateway": {"port": 9000}}))
    changed = read_again()
    assert [replica.name for replica in changed.models[0].replicas] == ["one", "two"]
    assert (changed.port, changed.api_keys) == (9001, first.api_keys)
    file.write_text(yaml.safe_dump({"models": [{"remote": remote}], "log_format": "json"}))
    with pytest.raises(ConfigError, match=r"^log_format: cannot change"):
        read_again()


def test_without_a_file_there_is_nothing_to_read_again(configured: Run, model_folder: Path) -> None:
    configured(str(model_folder), "--replica", "one=unix:/run/e.sock")
    assert again[-1] is None


def test_keys_of_clients_are_not_left_for_child_processes(configured: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HEADRACE_API_KEY", "a-secret-key")
    config = configured("--replica", "one=unix:/run/e.sock")
    assert len(config.api_keys) == 1
    assert "HEADRACE_API_KEY" not in os.environ


@pytest.mark.socket
def test_several_workers_are_started_by_a_supervisor_without_engines(monkeypatch: pytest.MonkeyPatch) -> None:
    started: list[FleetConfig] = []

    def run_fleet(config: FleetConfig, **options: object) -> int:
        started.append(config)
        return 0

    monkeypatch.setattr("headrace.fleet.supervisor.run_fleet", run_fleet)
    monkeypatch.setattr(sys, "argv", ["headrace", "gateway", "--replica", "one=unix:/run/e.sock", "--workers", "2", "--port", "0"])
    with pytest.raises(SystemExit) as ended:
        main()
    assert ended.value.code == 0
    [fleet] = started
    assert (fleet.num_gateways, [model.replicas for model in fleet.models]) == (2, [0])
    assert [replica["name"] for replica in fleet.models[0].remote] == ["one"]


@pytest.mark.socket
def test_engines_that_are_pods_are_found_by_a_supervisor(
    monkeypatch: pytest.MonkeyPatch, configured: Run, model_folder: Path, tmp_path: Path
) -> None:
    remote: dict[str, object] = {"model": str(model_folder), "tls_dir": str(tmp_path), "kubernetes": {"service": "engines"}}
    file = tmp_path / "headrace.yaml"
    file.write_text(yaml.safe_dump({"models": [{"remote": remote}], "gateway": {"port": 0}}))
    started: list[FleetConfig] = []

    def run_fleet(config: FleetConfig, **options: object) -> int:
        started.append(config)
        return 0

    monkeypatch.setattr("headrace.fleet.supervisor.run_fleet", run_fleet)
    monkeypatch.setattr(sys, "argv", ["headrace", "gateway", "--config", str(file)])
    with pytest.raises(SystemExit):
        main()
    [model] = started[0].models
    assert model.kubernetes == KubernetesService(service="engines")
    assert (model.replicas, [each["tls_dir"] for each in model.remote]) == (0, [str(tmp_path)])

    file.write_text(yaml.safe_dump({"models": [{"remote": {"model": str(model_folder), "replicas": [ONE]}}], "gateway": {"port": 0}}))
    configured("--config", str(file))
    read_again = again[-1]
    assert read_again is not None
    file.write_text(yaml.safe_dump({"models": [{"remote": remote}], "gateway": {"port": 0}}))
    with pytest.raises(ConfigError, match=r"^remote\.kubernetes: needs a supervisor"):
        read_again()


ONE = {"name": "one", "address": "unix:/run/e.sock"}


@pytest.mark.parametrize(
    ("arguments", "code", "what"),
    [
        ([], CommandExitCode.USAGE, "--replica: name the engines"),
        (["--replica", "gpu1"], CommandExitCode.USAGE, "--replica: 'gpu1' is not NAME=ADDRESS"),
        (["--replica", f"one={TCP}"], CommandExitCode.CONFIG, "--replica: '10.0.0.7' is not a loopback address, and no certificates"),
        (["--replica", "one=127.0.0.1:7001"], CommandExitCode.CONFIG, "--replica: '127.0.0.1:7001' needs a token"),
        (
            ["--replica", "a=unix:/a", "--replica", "a=unix:/b"],
            CommandExitCode.CONFIG,
            "--replica: must name at least one replica, each name once",
        ),
        (["--replica", "a/b=unix:/a"], CommandExitCode.CONFIG, "--replica: 'a/b' is not a replica name"),
        (["/absent", "--replica", "a=unix:/a"], CommandExitCode.CONFIG, "MODEL: there is no folder '/absent'"),
        (["--replica", "a=unix:/a", "--host", "0.0.0.0"], CommandExitCode.CONFIG, "--host: 0.0.0.0 can be reached from other machines"),
        (["--replica", "a=unix:/a", "--workers", "65"], CommandExitCode.CONFIG, "--workers: 65 is outside 1..64"),
        (["--config", "/absent.yaml"], CommandExitCode.CONFIG, "/absent.yaml"),
    ],
)
def test_what_a_gateway_is_not_started_with_is_refused_under_the_flags_name(
    arguments: list[str], code: int, what: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(sys, "argv", ["headrace", "gateway", *arguments])
    with pytest.raises(SystemExit) as ended:
        main()
    assert (ended.value.code, what in (error := capsys.readouterr().err)) == (code, True), error


class UnusedTextWorkers(LocalWorkers):
    """Of a gateway that is refused before it asks anything of them."""

    def spawn(self) -> None:
        return

    def kill(self) -> None:
        return


@pytest.mark.socket
def test_a_gateway_does_not_start_with_an_engines_certificate(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("headrace.gateway.process.set_up_logging", lambda *, process: None)
    monkeypatch.setattr("headrace.gateway.process.text_workers", lambda config: UnusedTextWorkers(TextContext({})))
    monkeypatch.setattr(sys, "setswitchinterval", lambda seconds: None)
    init(tmp_path / "site", host=["127.0.0.2"])
    arguments = ["--replica", "one=127.0.0.2:7001", "--tls-dir", str(tmp_path / "site" / "engine-127.0.0.2"), "--port", "0"]
    monkeypatch.setattr(sys, "argv", ["headrace", "gateway", *arguments])
    with pytest.raises(SystemExit) as ended:
        main()
    assert ended.value.code == 2
    assert "tls.crt is for another role (its extended key usage). It must be a certificate for the gateway." in capsys.readouterr().err


def test_a_model_that_needs_engines_of_its_own_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    file = tmp_path / "headrace.yaml"
    file.write_text("models: [{engine: {model: headrace-tiny}}]\n")
    monkeypatch.setattr(sys, "argv", ["headrace", "gateway", "--config", str(file)])
    with pytest.raises(SystemExit) as ended:
        main()
    assert ended.value.code == CommandExitCode.CONFIG
    assert "models[0].engine: is not started by `headrace gateway`. Use `headrace serve`" in capsys.readouterr().err


def test_the_operators_address_wants_a_supervisor(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file = tmp_path / "headrace.yaml"
    admin = {"listen": "127.0.0.1:7100", "token_file": "/etc/token"}
    file.write_text(yaml.safe_dump({"models": [{"name": "far", "upstreams": [{"url": "http://127.0.0.1:9/v1"}]}], "admin": admin}))
    monkeypatch.setattr(sys, "argv", ["headrace", "gateway", "--config", str(file), "--state", str(tmp_path / "state")])
    try:
        with pytest.raises(SystemExit) as ended:
            main()
    finally:
        signal.pthread_sigmask(signal.SIG_UNBLOCK, {signal.SIGHUP})
    assert ended.value.code == CommandExitCode.CONFIG
    assert "admin: needs a supervisor" in capsys.readouterr().err


@pytest.mark.socket
def test_a_reload_that_is_asked_for_during_the_start_waits_for_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Where the signal came before there was a handler, it ended the gateway."""
    file = tmp_path / "site.yaml"
    remote = {"model": "headrace-tiny", "replicas": [{"name": "one", "address": f"unix:{tmp_path}/none.sock"}]}
    file.write_text(yaml.safe_dump({"models": [{"name": "m", "remote": remote}], "gateway": {"port": 0}}), encoding="utf-8")
    ended: list[int] = []
    reloads: list[None] = []

    async def serve() -> None:
        with StopSignals() as stop, on_hangup(lambda: reloads.append(None), stop):
            assert not reloads
            async with asyncio.timeout(60):
                while not reloads:
                    await asyncio.sleep(0.01)

    def run_gateway(read: Callable[[], GatewayConfig], **_: object) -> int:
        signal.pthread_kill(threading.get_ident(), signal.SIGHUP)  # a gateway that starts has this thread alone
        asyncio.run(serve())
        return 0

    monkeypatch.setattr("headrace.gateway.process.run_gateway", run_gateway)
    monkeypatch.setattr(sys, "argv", ["headrace", "gateway", "--config", str(file)])
    before = signal.signal(signal.SIGHUP, lambda number, _: ended.append(number))
    try:
        with pytest.raises(SystemExit) as left:
            main()
    finally:
        signal.pthread_sigmask(signal.SIG_UNBLOCK, {signal.SIGHUP})
        signal.signal(signal.SIGHUP, before)
    assert (left.value.code, ended, len(reloads)) == (0, [], 1)


def test_an_empty_host_is_not_the_default(headrace: Headrace) -> None:
    done = headrace("gateway", "--replica", "one=unix:/none.sock", "--host", "")
    assert (done.returncode, "--host: '' names no address" in done.stderr) == (3, True), done.stderr
