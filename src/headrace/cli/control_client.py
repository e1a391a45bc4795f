"""The operator's end of a deployment's admin socket: finds the deployment, sends a command, reads what it says line by line."""

from __future__ import annotations

import json
import os
import socket
from collections.abc import Iterator, Mapping
from contextlib import closing, contextmanager
from http.client import HTTPConnection, HTTPException, HTTPResponse
from pathlib import Path
from typing import Any

from headrace.cli.exits import ServerFailed
from headrace.core.errors import ConfigError
from headrace.fleet.admin import SOCKET_NAME, TOKEN_NAME
from headrace.fleet.files import is_running, running_deployments

CONNECT_TIMEOUT_S = 5.0

STATUS_TIMEOUT_S = 10.0
"""Seconds for the answer to a status, for which the supervisor waits for its gateways for two. Commands take as long as they take."""

RUN_DIR_VARIABLE = "HEADRACE_RUN_DIR"
"""Environment variable that `headrace serve` reads its `run_dir` from: the unit for systemd sets it."""


def find_deployment(run_dir: Path | None) -> Path:
    """The folder of the one deployment that runs here.

    run_dir  its folder, or the parent that its configuration names; None: HEADRACE_RUN_DIR, else where `headrace serve` puts it by itself

    Raises: ServerFailed when there is none, ConfigError when there are several.
    """
    if run_dir is None and (named := os.environ.get(RUN_DIR_VARIABLE)):
        run_dir = Path(named)
    if run_dir is not None and is_running(run_dir):
        return run_dir
    found = running_deployments(run_dir)
    if not found:
        place = f"in {run_dir}" if run_dir is not None else "for this user"
        raise ServerFailed(f"no deployment of `headrace serve` runs {place}. Name its run directory: --run-dir DIR.")
    if len(found) > 1:
        raise ConfigError("--run-dir", f"is missing, and {len(found)} deployments run", f"One of: {', '.join(map(str, found))}.")
    return found[0]


class AdminClient:
    """Talks to one deployment. Raises ServerFailed when it does not answer, or ends before it has."""

    def __init__(self, folder: Path) -> None:
        """folder: the deployment's own. Raises ServerFailed where its token cannot be read"""
        self.folder = folder
        try:
            token = (folder / TOKEN_NAME).read_text(encoding="ascii")
        except OSError as error:
            raise ServerFailed(
                f"{folder / TOKEN_NAME} cannot be read ({error.strerror}): the deployment is starting or has ended"
            ) from None
        self._headers = {"authorization": f"Bearer {token}", "content-type": "application/json"}

    def status(self) -> dict[str, Any]:
        with self._response("GET", "/status", timeout_s=STATUS_TIMEOUT_S) as response:
            try:
                found: dict[str, Any] = json.loads(response.read())
            except (OSError, HTTPException, ValueError) as error:
                raise ServerFailed(f"the deployment in {self.folder} does not answer ({error})") from None
        return found

    def command(self, name: str, body: Mapping[str, object]) -> Iterator[dict[str, Any]]:
        """Every line of the answer as it comes; the last one says how the command ended."""
        is_ended = False
        with self._response("POST", f"/{name}", json.dumps(body)) as response:
            for line in _lines(response):
                is_ended = line["event"] != "progress"
                yield line
        if not is_ended:
            raise ServerFailed("the deployment ended before the command did")

    @contextmanager
    def _response(self, method: str, path: str, body: str | None = None, *, timeout_s: float | None = None) -> Iterator[HTTPResponse]:
        """timeout_s: for each wait for an answer; None: as long as it takes"""
        with closing(_UnixConnection(self.folder / SOCKET_NAME, timeout_s)) as connection:
            try:
                connection.request(method, path, body, self._headers)
                response = connection.getresponse()
            except (OSError, HTTPException) as error:
                raise ServerFailed(f"the deployment in {self.folder} does not answer ({error})") from None
            with response:
                if response.status != 200:
                    said = response.read(400).decode(errors="replace")
                    raise ServerFailed(f"the deployment in {self.folder} answered {response.status}: {said}")
                yield response


def _lines(response: HTTPResponse) -> Iterator[dict[str, Any]]:
    """Lines of JSON until the answer ends, or breaks off."""
    try:
        for line in response:
            yield json.loads(line)
    except (OSError, HTTPException, ValueError):
        return


class _UnixConnection(HTTPConnection):
    def __init__(self, path: Path, timeout_s: float | None = None) -> None:
        super().__init__("headrace")
        self._path = path
        self._timeout_s = timeout_s

    def connect(self) -> None:
        self.sock = socket.socket(socket.AF_UNIX)
        self.sock.settimeout(CONNECT_TIMEOUT_S)
        self.sock.connect(str(self._path))
        self.sock.settimeout(self._timeout_s)
