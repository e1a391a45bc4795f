"""A server started for as long as a command needs one: `headrace serve` on a free loopback port, stopped with the block."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import threading
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import IO

from headrace.cli.exits import ServerFailed
from headrace.fleet.config import COMMAND

URL_LINE = re.compile(r"^Serving .* at (http://\S+)$")
"""What `headrace serve` prints once it answers; `cli.serve` writes it."""
STOP_TIMEOUT_S = 30.0


@contextmanager
def started_server(model: str | None, arguments: Sequence[str] = (), *, api_key: str | None = None) -> Iterator[str]:
    """Serve `model` (None: the bundled one) and yield the URL once it answers.

    api_key  what it asks its clients for; told through its environment, which other users cannot read

    It is in a process group of its own: Ctrl-C on the terminal is for us, and we stop it. A hangup or SIGTERM ends the block, too.

    Raises: ServerFailed with the server's last words when it ends before it answers.
    """
    command = [*COMMAND, "serve", *([model] if model else []), "--port", "0", *arguments]
    environment = {**os.environ, **({"HEADRACE_API_KEY": api_key} if api_key else {})}
    with _left_on(signal.SIGHUP, signal.SIGTERM):
        yield from _serving(command, environment)


def _serving(command: Sequence[str], environment: Mapping[str, str]) -> Iterator[str]:
    process = subprocess.Popen(
        command,
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        env=environment,
        process_group=0,
    )
    assert process.stdout is not None
    assert process.stderr is not None
    last_words: list[str] = []
    # stderr is read on a thread of its own: a full pipe would stop the server.
    reader = threading.Thread(target=_keep_tail, args=(process.stderr, last_words), daemon=True)
    reader.start()
    try:
        yield _wait_for_url(process.stdout, last_words, reader)
    finally:
        process.terminate()
        try:
            process.wait(STOP_TIMEOUT_S)
        except (subprocess.TimeoutExpired, KeyboardInterrupt):
            process.kill()
            process.wait()
        reader.join(1.0)
        process.stdout.close()
        process.stderr.close()


@contextmanager
def _left_on(*numbers: signal.Signals) -> Iterator[None]:
    """These signals leave the block as an exception does, instead of ending the process with the server still there."""

    def leave(number: int, frame: object) -> None:
        raise SystemExit(128 + number)

    before = {number: signal.getsignal(number) for number in numbers}
    for number, handler in before.items():
        if handler is not signal.SIG_IGN:  # nohup
            signal.signal(number, leave)
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


def _wait_for_url(stdout: IO[str], last_words: list[str], reader: threading.Thread) -> str:
    for line in stdout:
        if found := URL_LINE.match(line.strip()):
            threading.Thread(target=_keep_tail, args=(stdout, []), daemon=True).start()
            return found.group(1)
    reader.join(5.0)
    raise ServerFailed("the server ended before it answered" + "".join(f"\n  {line}" for line in last_words))


def _keep_tail(stream: IO[str], lines: list[str]) -> None:
    try:
        for line in stream:
            lines.append(line.rstrip())
            del lines[:-10]
    except ValueError:  # closed while reading: the server is being stopped
        return
