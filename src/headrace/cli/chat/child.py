"""Runs a server for as long as a command needs one: `headrace serve` on a free loopback port, stopped at the end of a `with` block."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import threading
from collections import deque
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from tempfile import TemporaryDirectory
from typing import IO

from headrace.cli.config.state import VARIABLE
from headrace.cli.exits import ServerFailed
from headrace.fleet.config import COMMAND

URL_LINE = re.compile(r"\bServing .* at (https?://[^\s\"]+)")
"""Matches the line, text or JSON, that `headrace serve` writes to stderr once it answers (`cli.servers.announcement`)."""
STOP_TIMEOUT_S = 30.0


@contextmanager
def started_server(model: str | None, arguments: Sequence[str] = (), *, api_key: str | None = None) -> Iterator[str]:
    """Serve `model` (None: the bundled one) and yield the URL once the server answers.

    api_key  passed in the server's environment, which other users cannot read

    The state folder is a temporary one: none of this user's keys applies, and no usage is recorded as this user's. The process group is its
    own: Ctrl-C reaches only this process. SIGHUP and SIGTERM leave the block, and so stop the server.

    Raises ServerFailed with the last lines of the log if the server ends before it answers.
    """
    command = [*COMMAND, "serve", *([model] if model else []), "--port", "0", *arguments]
    environment = {**os.environ, **({"HEADRACE_API_KEY": api_key} if api_key else {})}
    with _left_on(signal.SIGHUP, signal.SIGTERM), TemporaryDirectory(prefix="headrace-state-") as state:
        yield from _serving(command, {**environment, VARIABLE: state})


def _serving(command: Sequence[str], environment: Mapping[str, str]) -> Iterator[str]:
    process = subprocess.Popen(
        command,
        stdin=subprocess.DEVNULL,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.PIPE,
        text=True,
        env=environment,
        process_group=0,
    )
    assert process.stderr is not None
    reader = _LogReader(process.stderr)
    reader.start()
    try:
        yield reader.wait_for_url()
    finally:
        process.terminate()
        try:
            process.wait(STOP_TIMEOUT_S)
        except (subprocess.TimeoutExpired, KeyboardInterrupt):
            process.kill()
            process.wait()
        reader.join(1.0)
        process.stderr.close()


@contextmanager
def _left_on(*numbers: signal.Signals) -> Iterator[None]:
    """Make these signals leave the block with an exception, instead of ending the process while the server runs on.

    A signal that was ignored (SIGHUP under nohup, SIGTERM after a shell's `trap '' TERM`) stays ignored.
    """

    def leave(number: int, frame: object) -> None:
        if before[signal.Signals(number)] is not signal.SIG_IGN:
            raise SystemExit(128 + number)

    before = {number: signal.getsignal(number) for number in numbers}
    for number, handler in before.items():
        # A handler even where it is ignored: the server would inherit that, and not leave on the SIGTERM that is to stop it. What is
        # handled here has its default action there. Under nohup the server ignores SIGHUP too.
        if handler is not signal.SIG_IGN or number is signal.SIGTERM:
            signal.signal(number, leave)
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


class _LogReader(threading.Thread):
    """Reads the server's log to its end: a full pipe would stop the server."""

    def __init__(self, stream: IO[str]) -> None:
        super().__init__(name="server log", daemon=True)
        self._stream = stream
        self._last_lines: deque[str] = deque(maxlen=10)
        self._url: str | None = None
        self._is_known = threading.Event()

    def run(self) -> None:
        try:
            for line in self._stream:
                self._last_lines.append(_message(line))
                if self._url is None and (serving := URL_LINE.search(line)):
                    self._url = serving.group(1)
                    self._is_known.set()
        except ValueError:  # closed while reading: the server is being stopped
            pass
        finally:
            self._is_known.set()

    def wait_for_url(self) -> str:
        """Raises ServerFailed if the server ends before it serves."""
        self._is_known.wait()
        if self._url is None:
            raise ServerFailed("the server ended before it answered" + "".join(f"\n  {line}" for line in self._last_lines))
        return self._url


def _message(line: str) -> str:
    try:
        return str(json.loads(line)["message"])
    except (ValueError, TypeError, KeyError):
        return line.rstrip()
