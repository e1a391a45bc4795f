"""Tests the shipped systemd unit: what it promises, what systemd says of it, and a real service manager that restarts a killed
supervisor.
"""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import psutil
import pytest
from patience import until
from server_kit import is_alive
from wire_kit import socket_dir

import headrace
from headrace.cli.config.faults import unread_variables
from headrace.fleet.config import FleetConfig
from headrace.fleet.supervisor import CUT_GRACE_S, ENGINE_GRACE_S, GATEWAY_GRACE_S, FleetExit
from tests.house.reader import ROOT

pytestmark = pytest.mark.pure

UNIT = ROOT / "deploy" / "systemd" / "headrace.service"
PROGRAM = "/opt/headrace/bin/headrace"
SYSTEMD_ANALYZE = shutil.which("systemd-analyze")
MANAGER = Path("/lib/systemd/systemd")
SUPPORT = ROOT / "tests" / "support"
IN_A_NAMESPACE = (
    "mount --make-rprivate / && mount -t tmpfs tmpfs /run/systemd && mkdir /run/systemd/system && "
    f"exec {MANAGER} --user --unit=basic.target"
)
"""A service manager of its own, which refuses to run where this directory says that the machine was not booted with systemd."""


def settings() -> dict[str, list[str]]:
    """Key -> its values, of all sections; no key of the unit stands in two."""
    found: dict[str, list[str]] = {}
    for line in UNIT.read_text().splitlines():
        if line and line[0] not in "#[":
            key, _, value = line.partition("=")
            found.setdefault(key, []).append(value)
    return found


def test_a_supervisor_that_ends_is_started_again_and_never_given_up() -> None:
    unit = settings()
    assert (unit["Restart"], unit["StartLimitIntervalSec"], unit["OOMPolicy"]) == (["always"], ["0"], ["continue"])
    assert unit["RestartPreventExitStatus"] == ["2"]
    assert unit["SuccessExitStatus"] == [str(int(FleetExit.CUT))]
    assert unit["ExecReload"] == ["/bin/kill -HUP $MAINPID"]


def test_a_stop_leaves_time_for_the_drain() -> None:
    unit = settings()
    longest_s = FleetConfig(models=()).drain_timeout_s + GATEWAY_GRACE_S + CUT_GRACE_S + ENGINE_GRACE_S
    assert unit["KillMode"] == ["mixed"], "the supervisor alone is asked, and drains its children in order"
    assert float(unit["TimeoutStopSec"][0]) > longest_s


def test_it_may_open_enough_descriptors_and_its_variables_are_read() -> None:
    unit = settings()
    assert int(unit["LimitNOFILE"][0]) >= 20_000
    variables = dict(value.split("=", 1) for value in unit["Environment"])
    assert {"HEADRACE_RUN_DIR", "HEADRACE_CACHE_DIR"} <= set(variables)
    assert not list(unread_variables(variables))
    assert variables["HEADRACE_STATE"] == f"{variables['HOME']}/state", "in a folder that systemd makes for it"
    for name, key in (("HEADRACE_RUN_DIR", "RuntimeDirectory"), ("HEADRACE_CACHE_DIR", "CacheDirectory"), ("HOME", "StateDirectory")):
        assert variables[name].endswith(f"/{unit[key][0]}"), "a folder that systemd makes for it"


@pytest.mark.skipif(SYSTEMD_ANALYZE is None, reason="systemd is not installed: run `make systemd`")
@pytest.mark.process
@pytest.mark.slow
def test_systemd_finds_no_fault_in_it(tmp_path: Path) -> None:
    assert SYSTEMD_ANALYZE is not None
    unit = tmp_path / UNIT.name
    text = UNIT.read_text()
    assert f"ExecStart={PROGRAM} serve --config /etc/headrace/headrace.yaml" in text
    unit.write_text(text.replace(PROGRAM, "/bin/true"))
    done = subprocess.run([SYSTEMD_ANALYZE, "verify", "--recursive-errors=no", str(unit)], capture_output=True, text=True, check=False)
    assert (done.returncode, done.stdout, done.stderr) == (0, "", "")


class Manager:
    """A running `systemd --user` in a folder of its own."""

    def __init__(self, folder: Path) -> None:
        self.environment = {
            "PATH": os.environ["PATH"],
            "XDG_RUNTIME_DIR": str(folder),
            "HOME": str(folder),
            "SYSTEMD_UNIT_PATH": str(folder),
        }

    def control(self, *arguments: str) -> str:
        command = ["systemctl", "--user", *arguments]
        return subprocess.run(command, env=self.environment, capture_output=True, text=True, check=True, timeout=90).stdout.strip()

    def main_pid(self) -> int:
        return int(self.control("show", UNIT.name, "--property=MainPID", "--value") or 0)


@contextmanager
def managing(folder: Path) -> Iterator[Manager]:
    manager = Manager(folder)
    (folder / "basic.target").write_text("[Unit]\nDescription=Nothing\n")
    with open(folder / "manager.log", "wb") as log:
        command = ["unshare", "--mount", "sh", "-c", IN_A_NAMESPACE]
        process = subprocess.Popen(command, env=manager.environment, stdin=subprocess.DEVNULL, stdout=log, stderr=log)
    try:
        until(lambda: (folder / "systemd" / "private").exists())
        yield manager
    finally:
        children = psutil.Process(process.pid).children(recursive=True) if process.poll() is None else []
        process.kill()
        process.wait()
        for child in children:
            if child.is_running():
                child.kill()


def unit_for(folder: Path) -> str:
    """The shipped unit with a fleet of tests in it, as a unit of a user.

    Its user and its folders are the machine's to make, and a container may not mount anew what the kernel's files are.
    """
    (folder / "fleet.json").write_text(json.dumps({"replicas": 1, "run_dir": str(folder), "gateway": {"work": "idle", "workers": 2}}))
    of_the_machine = ("User=", "Group=", "RuntimeDirectory", "StateDirectory", "CacheDirectory", "WorkingDirectory=", "Environment=")
    dropped = (*of_the_machine, "PrivateTmp=", "ProtectControlGroups=", "ProtectKernel")
    lines = [line for line in UNIT.read_text().splitlines() if not line.startswith(dropped)]
    start = f"ExecStart={sys.executable} {SUPPORT / 'fleet_main.py'} {folder / 'fleet.json'}"
    path = os.pathsep.join(map(str, (Path(headrace.__file__).resolve().parents[1], SUPPORT)))
    new = f"{start}\nEnvironment=PYTHONPATH={path}\nReadWritePaths={folder}"
    return "\n".join(line if not line.startswith("ExecStart=") else new for line in lines) + "\n"


def processes_of(supervisor: int) -> list[psutil.Process]:
    return [psutil.Process(supervisor), *psutil.Process(supervisor).children(recursive=True)]


@pytest.mark.slow
@pytest.mark.skipif(not MANAGER.exists(), reason="systemd is not installed: run `make systemd`")
@pytest.mark.skipif(os.geteuid() != 0, reason="a service manager of its own needs root, for a mount namespace")
@pytest.mark.process
def test_a_killed_supervisor_is_started_again_without_an_orphan_and_a_stop_drains() -> None:
    with socket_dir() as folder, managing(folder) as manager:
        (folder / UNIT.name).write_text(unit_for(folder))
        manager.control("daemon-reload")
        manager.control("start", UNIT.name)
        first = manager.main_pid()
        until(lambda: len(processes_of(first)) == 4)
        before = processes_of(first)
        os.kill(first, signal.SIGKILL)
        until(lambda: manager.main_pid() not in (0, first))
        second = manager.main_pid()
        assert not [process.pid for process in before if is_alive(process.pid)], "none of the first supervisor's processes is left"
        until(lambda: len(processes_of(second)) == 4)
        assert manager.control("show", UNIT.name, "--property=NRestarts", "--value") == "1"
        [run_dir] = [path for path in folder.glob("headrace-*") if path.is_dir()]
        after = processes_of(second)
        manager.control("stop", UNIT.name)
        assert not [process.pid for process in after if is_alive(process.pid)]
        assert not run_dir.exists(), "it was asked to stop, not killed"
        assert manager.control("show", UNIT.name, "--property=Result", "--value") == "success"
