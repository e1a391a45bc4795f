"""Tests commands for a running deployment: what is refused before one is asked, and how they end. What they do:
tests/fleet/test_control.py.
"""

from __future__ import annotations

import json
import re
import socket
from collections.abc import Iterator, Mapping
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import typer
from wire_kit import socket_dir

from headrace.cli.admin import adapters
from headrace.cli.admin import client as control_client
from headrace.cli.admin.control import drain, reload, rollout, scale, sleep, status, wake
from headrace.cli.exits import CommandExitCode, ServerFailed, UsageRefused
from headrace.core.errors import ConfigError
from headrace.fleet.files import run_dir

pytestmark = pytest.mark.pure


class Scripted:
    """A deployment that says what it was given. asked: commands and bodies"""

    said: tuple[dict[str, Any], ...] = ()
    state: Mapping[str, Any] = {}
    adapter_rows: tuple[Mapping[str, Any], ...] = ()
    asked: list[tuple[str, Mapping[str, object]]]

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        Scripted.asked = []

    def is_running(self) -> bool:
        return False

    def adapters(self) -> list[Mapping[str, Any]]:
        return [*self.adapter_rows]

    def status(self) -> Mapping[str, Any]:
        return self.state

    def command(self, name: str, body: Mapping[str, object]) -> Iterator[dict[str, Any]]:
        Scripted.asked.append((name, body))
        yield from self.said


@pytest.fixture
def scripted(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> type[Scripted]:
    monkeypatch.setattr(control_client, "AdminClient", Scripted)
    monkeypatch.setattr(control_client, "find_deployment", lambda run_dir: tmp_path)
    return Scripted


PROGRESS = {"event": "progress", "text": "tiny-1 serves"}


@pytest.mark.parametrize(
    ("last", "code", "word"),
    [
        ({"event": "done"}, 0, ""),
        ({"event": "failed", "reason": "tiny-1 cannot be started"}, 1, "headrace: tiny-1 cannot be started\n"),
        ({"event": "refused", "reason": "gateway.port: no"}, 3, "headrace: nothing was changed: gateway.port: no\n"),
    ],
)
def test_a_command_prints_progress_and_ends_as_it_was_answered(
    scripted: type[Scripted], capsys: pytest.CaptureFixture[str], last: dict[str, Any], code: int, word: str
) -> None:
    scripted.said = (PROGRESS, last)
    with pytest.raises(typer.Exit) as ended:
        rollout("tiny", max_surge=0, allow_outage=True)
    assert ended.value.exit_code == code
    assert capsys.readouterr() == ("tiny-1 serves\n", word)
    assert scripted.asked == [("rollout", {"model": "tiny", "max_surge": 0, "allow_outage": True})]


def test_each_command_sends_its_body(scripted: type[Scripted]) -> None:
    scripted.said = ({"event": "done"},)
    bodies = []
    drains = (partial(drain, 2.5, "tiny-1"), partial(drain, 1.0, everything=True))
    calls = (reload, partial(scale, "org/tiny=3"), *drains, partial(sleep, "tiny"), partial(wake, "tiny"))
    for call in calls:
        with pytest.raises(typer.Exit) as ended:
            call()
        assert ended.value.exit_code == 0
        bodies += scripted.asked
    assert bodies == [
        ("reload", {}),
        ("scale", {"model": "org/tiny", "replicas": 3}),
        ("drain", {"replica": "tiny-1", "within_s": 2.5, "allow_outage": False}),
        ("drain", {"replica": None, "within_s": 1.0, "allow_outage": False}),
        ("sleep", {"model": "tiny", "level": "ram"}),
        ("wake", {"model": "tiny"}),
    ]


def test_adapters_are_loaded_and_unloaded_by_name(scripted: type[Scripted]) -> None:
    scripted.said = ({"event": "refused", "reason": "PATH: no."},)
    for call, expected in (
        (partial(adapters.load, "sql", "team/sql"), ("load-adapter", {"name": "sql", "path": "team/sql", "model": None})),
        (partial(adapters.unload, "sql", "tiny"), ("unload-adapter", {"name": "sql", "model": "tiny"})),
    ):
        with pytest.raises(typer.Exit) as ended:
            call()
        assert ended.value.exit_code == CommandExitCode.CONFIG
        assert scripted.asked == [expected]


def test_adapters_are_listed(scripted: type[Scripted], capsys: pytest.CaptureFixture[str]) -> None:
    served = {"name": "sql", "model": "tiny", "origin": "run time", "path": "/a/sql", "digest": "0123456789abcdef", "state": ""}
    scripted.adapter_rows = (served, {**served, "name": "law", "digest": None, "state": "left out: gone"})
    adapters.list_adapters()
    assert capsys.readouterr().out.splitlines() == [
        "name  model  origin    path    digest        state",
        "sql   tiny   run time  /a/sql  0123456789ab  -",
        "law   tiny   run time  /a/sql  -             left out: gone",
    ]
    adapters.list_adapters(as_json=True)
    assert json.loads(capsys.readouterr().out) == [*scripted.adapter_rows]


@pytest.mark.parametrize("wanted", ["tiny", "tiny=", "=3", "tiny=-1", "tiny=many"])
def test_a_scale_without_a_model_and_a_number_is_refused(wanted: str) -> None:
    with pytest.raises(UsageRefused, match=r"MODEL=N: .* Write headrace scale tiny=2"):
        scale(wanted)


def test_a_drain_wants_one_target_and_a_time(scripted: type[Scripted]) -> None:
    for replica, everything in ((None, False), ("tiny-0", True)):
        with pytest.raises(UsageRefused, match="REPLICA and --all: give one of them"):
            drain(1.0, replica, everything=everything)
    with pytest.raises(UsageRefused, match="--within"):
        drain(float("nan"), "tiny-0")


def test_the_status_names_what_runs_and_why_something_does_not(scripted: type[Scripted], capsys: pytest.CaptureFixture[str]) -> None:
    facts = {"revision": 1, "starts": 1, "reason": ""}
    ready = {**facts, "name": "tiny-1", "phase": "serving", "ready": True, "open": 3, "pids": [12, 13]}
    failed = {**facts, "name": "tiny-2", "phase": "failed", "ready": False, "open": 0, "pids": [], "reason": "no memory."}
    leaving = {**facts, "name": "old-0", "phase": "draining", "ready": False, "open": None, "pids": [14]}
    model = {"name": "tiny", "served": "here", "upstreams": [], "wanted": 2, "revision": 1, "rollout": {"max_surge": 1}, "failure": ""}
    scripted.state = {
        "address": "127.0.0.1:8000",
        "config": "/etc/site.yaml",
        "command": "rollout tiny",
        "gateways": [{"name": "gateway", "pid": 11, "serving": True, "starts": 1}],
        "models": [
            {**model, "replicas": [ready, failed]},
            {"name": "far", "served": "elsewhere", "upstreams": ["far:7001"], "failure": "tokenizer.json: is missing."},
        ],
        "leaving": [leaving],
    }
    status()
    assert capsys.readouterr().out.splitlines() == [
        "at 127.0.0.1:8000, /etc/site.yaml",
        "gateways: gateway (pid 11)",
        "command: rollout tiny is running",
        "",
        "tiny: 1 of 2 replicas ready, revision 1, a rollout is under way",
        "  tiny-1: serving (revision 1, pids 12 13, 3 open, 1 start)",
        "  tiny-2: failed (revision 1, no process, 0 open, 1 start): no memory.",
        "",
        "far: answered by far:7001",
        "  tokenizer.json: is missing.",
        "",
        "of models that were removed:",
        "  old-0: draining (revision 1, pid 14, ? open, 1 start)",
    ]
    status(as_json=True)
    assert re.match(r'\{\n "address": "127.0.0.1:8000"', capsys.readouterr().out)


def test_a_deployment_that_does_not_run_is_named(tmp_path: Path) -> None:
    with pytest.raises(ServerFailed, match=f"no deployment of `headrace serve` runs in {tmp_path}"):
        status(tmp_path)


def test_the_run_directory_of_the_service_is_found_by_its_variable(monkeypatch: pytest.MonkeyPatch) -> None:
    with socket_dir() as parent:
        monkeypatch.setenv("HEADRACE_RUN_DIR", str(parent))
        with pytest.raises(ServerFailed, match=f"runs in {parent}"):
            control_client.find_deployment(None)
        with run_dir(parent) as folder:
            assert control_client.find_deployment(None) == folder
            with pytest.raises(ServerFailed, match=f"runs in {parent / 'other'}"):
                control_client.find_deployment(parent / "other")


def test_of_several_deployments_each_is_described_with_the_flag_that_chooses_it(monkeypatch: pytest.MonkeyPatch) -> None:
    far = {"name": "far", "served": "elsewhere", "upstreams": ["https://host/v1"], "failure": ""}
    found = {"address": "127.0.0.1:8000", "config": "/etc/site.yaml", "models": [{"name": "tiny", "upstreams": []}, far]}
    with socket_dir() as parent, run_dir(parent) as answers, run_dir(parent) as starting:
        monkeypatch.setattr(control_client.AdminClient, "status", lambda client: found)
        (answers / "admin.token").write_text("token")
        with pytest.raises(ConfigError) as refused:
            status(parent)
    first, *lines = str(refused.value).splitlines()
    assert first == "--run-dir: is missing, and 2 deployments run. Add one of:"
    assert sorted(lines) == sorted(
        [
            f"  --run-dir {answers}: 127.0.0.1:8000, /etc/site.yaml; tiny; far, answered by https://host/v1",
            f"  --run-dir {starting}: {starting}/admin.token cannot be read (No such file or directory): the deployment is starting or "
            "has ended",
        ]
    )


@pytest.mark.socket
def test_a_status_that_is_not_answered_fails_in_time(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(control_client, "STATUS_TIMEOUT_S", 0.2)
    with socket_dir() as folder, socket.socket(socket.AF_UNIX) as silent:
        (folder / "admin.token").write_text("token")
        silent.bind(str(folder / "admin.sock"))
        silent.listen()
        with pytest.raises(ServerFailed, match="does not answer"):
            control_client.AdminClient(folder).status()
