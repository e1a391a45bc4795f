"""Tests that `headrace serve` runs where the chart's pod would put it: its variables, its folders and nothing else that can be written.

No container engine is needed: the folders of the volumes belong to root and a group, as Kubernetes makes them, and where the test is root
the command is another user without rights, on a root file system that is mounted read-only for it alone.
"""

from __future__ import annotations

import json
import os
import re
import shlex
import signal
import socket
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from urllib.error import URLError
from urllib.request import Request, urlopen

import psutil
import pytest
from helm_kit import pod_of, rendered
from patience import PATIENCE_S, until
from server_kit import SOURCE, START_S, STOP_S
from wire_kit import socket_dir

from headrace.bundled import bundled_path
from headrace.registry.remote import Registry

pytestmark = pytest.mark.process

HEADRACE = str(Path(sys.executable).with_name("headrace"))
KEY = "sk-0123456789abcdef"
READS_ONLY = "+dac_read_search"
"""The interpreter may lie in the home of root: the command may read everything, and write as any other user."""


@pytest.fixture
def folder() -> Iterator[Path]:
    with socket_dir() as made:
        made.chmod(0o755)
        yield made


def test_it_answers_with_the_variables_and_the_volumes_of_the_pod(folder: Path) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
    # Beside the chart's defaults: any port, a model that is pulled, and no kernels to compile.
    Registry(f"file://{folder}/registry", may_make=True).push(bundled_path("headrace-tiny") or folder, "headrace-tiny", "1")
    engine = {"model": f"file://{folder}/registry/headrace-tiny:1", "kernels": "reference"}
    objects = rendered({"config": {"models": [{"engine": engine}], "gateway": {"port": port}}})
    pod = pod_of(objects)
    user, group = pod["securityContext"]["runAsUser"], pod["securityContext"]["fsGroup"]
    mounts = {mount["mountPath"]: folder / mount["name"] for mount in pod["containers"][0]["volumeMounts"]}
    config = mounts.pop("/etc/headrace")
    volumes = [*mounts.values()]
    for volume in volumes:
        make_volume(volume, group)
    project(config, objects["ConfigMap"]["data"])

    def here(path: str) -> str:
        return next((path.replace(mount, str(place), 1) for mount, place in mounts.items() if path.startswith(mount)), path)

    environment = {each["name"]: here(each["value"]) for each in pod["containers"][0]["env"]}
    environment |= {"HEADRACE_API_KEY": KEY, "HEADRACE_SITE_KEY": "0f" * 16, "TMPDIR": here("/tmp")}
    environment |= {"PATH": os.environ["PATH"], "PYTHONPATH": str(SOURCE)}  # and no HOME
    arguments = [argument.replace("/etc/headrace", str(config)) for argument in pod["containers"][0]["args"]]
    with open(folder / "log", "wb") as log:
        command = confined([HEADRACE, *arguments], volumes, user, group)
        process = subprocess.Popen(command, cwd="/", env=environment, stdin=subprocess.DEVNULL, stdout=log, stderr=log)
    try:
        until(lambda: is_ready(port) or process.poll() is not None, START_S, said=(folder / "log").read_text)
        assert process.poll() is None, (folder / "log").read_text()
        check_confined(process.pid, user)
        assert "Paris" in answer(port)
        assert "vllm:num_requests_waiting{" in get(port, "/metrics"), "without a key"
        assert re.search(r'vllm:cache_config_info{block_size="[1-9]\d*",[^}]*num_gpu_blocks="[1-9]\d*"} 1', get(port, "/metrics"))
        process.send_signal(signal.SIGTERM)
        assert process.wait(STOP_S) == 0
        assert list(mounts["/var/lib/headrace"].rglob("*.db"))
        assert list(mounts["/var/cache/headrace"].rglob("*.safetensors")), "the model"
        said = (folder / "log").read_text()
        assert levels(said) == {"info"}, said
    finally:
        kill(process)


def make_volume(path: Path, group: int) -> None:
    """As Kubernetes gives an emptyDir to a pod with fsGroup."""
    path.mkdir()
    if os.geteuid() == 0:
        os.chown(path, 0, group)
    path.chmod(0o2777)


def project(path: Path, data: dict[str, str]) -> None:
    """As the kubelet writes a ConfigMap: files are links into a folder that a link names."""
    (path / "..2026").mkdir(parents=True)
    (path / "..data").symlink_to("..2026")
    for name, text in data.items():
        (path / "..2026" / name).write_text(text, encoding="utf-8")
        (path / name).symlink_to(f"..data/{name}")


def confined(command: list[str], volumes: list[Path], user: int, group: int) -> list[str]:
    """As the user that runs the test, if that is not root."""
    if os.geteuid() != 0:
        return command
    rights = [f"--{of}=-all,{READS_ONLY}" for of in ("inh-caps", "ambient-caps", "bounding-set")]
    alone = ["setpriv", f"--reuid={user}", f"--regid={group}", "--clear-groups", "--no-new-privs", *rights, *command]
    if subprocess.run(["unshare", "--mount", "true"], check=False, capture_output=True).returncode != 0:
        return alone
    binds = [f"mount --bind {shlex.quote(str(path))} {shlex.quote(str(path))}" for path in volumes]
    steps = ["mount --make-rprivate /", *binds, "mount -o remount,bind,ro /", f"exec {shlex.join(alone)}"]
    return ["unshare", "--mount", "sh", "-c", " && ".join(steps)]


def check_confined(pid: int, user: int) -> None:
    """Of the command and of every process that it started."""
    if os.geteuid() != 0:
        return
    for process in (psutil.Process(pid), *psutil.Process(pid).children(recursive=True)):
        assert set(process.uids()) == {user}
        status = dict(line.split(":\t", 1) for line in Path(f"/proc/{process.pid}/status").read_text().splitlines() if ":\t" in line)
        assert int(status["CapEff"], 16) == 1 << 2, "CAP_DAC_READ_SEARCH"
        assert status["NoNewPrivs"] == "1"


def get(port: int, path: str) -> str:
    with urlopen(f"http://127.0.0.1:{port}{path}", timeout=PATIENCE_S) as reply:
        return str(reply.read().decode())


def is_ready(port: int) -> bool:
    try:
        return bool(json.loads(get(port, "/ready"))["ok"])
    except (URLError, ConnectionError):
        return False


def answer(port: int) -> str:
    body = {"model": "headrace-tiny", "messages": [{"role": "user", "content": "What is the capital of France?"}], "temperature": 0}
    headers = {"content-type": "application/json", "authorization": f"Bearer {KEY}"}
    request = Request(f"http://127.0.0.1:{port}/v1/chat/completions", json.dumps(body).encode(), headers)
    with urlopen(request, timeout=PATIENCE_S) as reply:
        return str(json.loads(reply.read())["choices"][0]["message"]["content"])


def levels(log: str) -> set[str]:
    """Of the process log; lines of the request log have none."""
    return {str(line["level"]) for line in map(json.loads, log.splitlines()) if "level" in line}


def kill(process: subprocess.Popen[bytes]) -> None:
    if process.poll() is None:
        children = psutil.Process(process.pid).children(recursive=True)
        process.kill()
        process.wait()
        for child in children:
            if child.is_running():
                child.kill()
