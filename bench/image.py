"""Runs the image of deploy/docker as the chart's pod would run, tries what it must not do, asks for a completion, and stops it.

    python -m bench.image IMAGE --base WHAT -> bench/results/image.json

It needs podman, and root for folders of the pod's group. User, capabilities, variables and mounts are those that Helm renders; each
emptyDir is a folder here. There is no network but loopback, and podman's seccomp filter.
"""

from __future__ import annotations

import argparse
import json
import os
import secrets
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping
from dataclasses import asdict
from pathlib import Path
from typing import Any

import helm_python
import yaml

from bench.harness import RESULTS, ROOT, write_portable
from headrace.lab.environment import environment

NAME = "headrace-image"
START_S = 300.0

READY = "import urllib.request; urllib.request.urlopen('http://127.0.0.1:8000/ready', timeout=5)"
PROBE = """
import json, os, socket, urllib.request

def failure(attempt, *arguments):
    try:
        attempt(*arguments)
    except OSError as error:
        return error.strerror

question = {"model": "headrace-tiny", "messages": [{"role": "user", "content": "What is the capital of France?"}], "max_tokens": 20}
headers = {"content-type": "application/json", "authorization": "Bearer " + os.environ["HEADRACE_API_KEY"]}
request = urllib.request.Request("http://127.0.0.1:8000/v1/chat/completions", json.dumps(question).encode(), headers)
with urllib.request.urlopen(request, timeout=60) as response:
    answer = json.load(response)["choices"][0]["message"]["content"]
with open("/proc/self/status") as file:
    status = dict(line.split(":", 1) for line in file.read().splitlines())
print(json.dumps({
    "answer": answer,
    "user": [os.getuid(), os.getgid()],
    **{name: status[name].strip() for name in ("CapEff", "CapBnd", "NoNewPrivs", "Seccomp")},
    "writing": {path: failure(open, path, "w") for path in ("/x", "/opt/headrace/x", "/etc/headrace/x", "/usr/bin/x")},
    "connecting": failure(socket.create_connection, ("192.0.2.1", 80), 3),
    "setuid": failure(os.setuid, 0),
}))
"""


def rendered() -> tuple[dict[str, Any], dict[str, str]]:
    """The pod of the chart's own values, and the files of its ConfigMap."""
    with helm_python.Chart.load(ROOT / "deploy" / "helm" / "headrace") as chart:
        files = chart.render({}, name="demo", namespace="llm")
    objects = {made["kind"]: made for path, text in files.items() if path.endswith(".yaml") for made in yaml.safe_load_all(text) if made}
    return objects["Deployment"]["spec"]["template"]["spec"], objects["ConfigMap"]["data"]


def run_words(folder: Path, image: str) -> list[str]:
    """What `podman run` is given. Makes the pod's volumes in `folder`."""
    pod, files = rendered()
    [container] = pod["containers"]
    user, limits = pod["securityContext"], container["securityContext"]
    assert (limits["readOnlyRootFilesystem"], limits["allowPrivilegeEscalation"], limits["capabilities"]) == (
        True,
        False,
        {"drop": ["ALL"]},
    )
    words = ["run", "-d", "--name", NAME, "--network", "none", "--read-only", "--read-only-tmpfs=false", "--cap-drop", "all"]
    words += ["--security-opt", "no-new-privileges", "--user", f"{user['runAsUser']}:{user['runAsGroup']}"]
    for mount in container["volumeMounts"]:
        volume = folder / mount["name"]
        volume.mkdir()
        if mount["name"] == "config":
            for name, text in files.items():
                (volume / name).write_text(text)
        else:
            os.chown(volume, 0, user["fsGroup"])
            volume.chmod(0o2777)  # an emptyDir's
        words += ["-v", f"{volume}:{mount['mountPath']}{':ro' if mount.get('readOnly') else ''}"]
    made = {"HEADRACE_API_KEY": secrets.token_hex(24), "HEADRACE_SITE_KEY": secrets.token_hex(32)}
    variables: Mapping[str, str] = {**{each["name"]: each["value"] for each in container["env"]}, **made}
    return [*words, *(word for name, value in variables.items() for word in ("-e", f"{name}={value}")), image, *container["args"]]


def podman(*words: str, given: str | None = None) -> str:
    """Raises subprocess.CalledProcessError."""
    return subprocess.run(["podman", *words], input=given, stdout=subprocess.PIPE, text=True, check=True).stdout


def tried(image: str, folder: Path) -> dict[str, object]:
    began = time.monotonic()
    podman(*run_words(folder, image))
    try:
        while subprocess.run(["podman", "exec", NAME, "python", "-c", READY], capture_output=True, check=False).returncode:
            if time.monotonic() > began + START_S:
                sys.exit(f"not ready after {START_S:.0f} s: {podman('logs', NAME)}")
            time.sleep(1)
        ready = time.monotonic()
        found: dict[str, object] = json.loads(podman("exec", "-i", NAME, "python", "-", given=PROBE))
        stopping = time.monotonic()
        podman("stop", "-t", "60", NAME)
        status = int(podman("inspect", NAME, "--format", "{{.State.ExitCode}}"))
        return {**found, "ready_s": ready - began, "stopped_s": time.monotonic() - stopping, "exit_status": status}
    finally:
        podman("rm", "-f", NAME)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("image")
    parser.add_argument("--base", required=True, help="What the image was built on, for the record.")
    given = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        found = tried(given.image, Path(folder))
    write_portable(RESULTS / "image.json", {"environment": asdict(environment()), "base": given.base, **found})
    print(json.dumps(found, indent=2))


if __name__ == "__main__":
    main()
