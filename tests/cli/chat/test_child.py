"""Tests a server started for one command: it answers inside the block and is gone after it."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest

from headrace.cli.chat import child
from headrace.cli.chat.child import started_server
from headrace.cli.chat.client import ApiClient
from headrace.cli.exits import ServerFailed
from headrace.fleet.config import COMMAND
from headrace.machine.signals import DUPLICATE_SIGNAL_S

pytestmark = pytest.mark.process


def test_a_server_that_cannot_start_fails_with_the_last_lines_of_its_log() -> None:
    with pytest.raises(ServerFailed, match=r"ended before it answered\n.*there is no folder '/absent'"), started_server("/absent"):
        pass


def test_the_servers_key_is_passed_where_other_users_cannot_read_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The stand-in says what it found: its URL's host is the key, its port the number of arguments."""
    program = tmp_path / "python"
    program.write_text('#!/bin/sh\necho "Serving m at http://$HEADRACE_API_KEY:$#" >&2\nexec sleep 60\n')
    program.chmod(0o700)
    monkeypatch.setattr(child, "COMMAND", (str(program),))
    monkeypatch.setenv("HEADRACE_API_KEY", "of-the-shell")
    for key, said in (("given", "given"), (None, "of-the-shell")):
        with started_server("folder", api_key=key) as url:
            assert url == f"http://{said}:4"


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGHUP])
def test_server_is_gone_when_its_command_is_ended_by_a_signal(tmp_path: Path, number: signal.Signals) -> None:
    program = tmp_path / "python"
    program.write_text(f'#!/bin/sh\necho $$ > {tmp_path}/pid\necho "Serving m at http://h:1" >&2\nexec sleep 60\n')
    program.chmod(0o700)
    code = f"import signal; signal.signal({int(number)}, signal.SIG_DFL)\n"  # under nohup it is ignored
    code += "import sys, time; from headrace.cli.chat import child; child.COMMAND, child.STOP_TIMEOUT_S = (sys.argv[1],), 600\n"
    code += "with child.started_server('m') as url:\n    print(url, flush=True); time.sleep(60)"
    process = subprocess.Popen([sys.executable, "-c", code, str(program)], stdout=subprocess.PIPE, text=True)
    assert process.stdout is not None
    assert process.stdout.readline() == "http://h:1\n"
    process.send_signal(number)
    assert process.wait(60) == 128 + number
    process.stdout.close()
    with pytest.raises(ProcessLookupError):
        os.kill(int((tmp_path / "pid").read_text()), 0)


def test_server_leaves_although_its_command_ignores_the_signal_that_stops_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """It inherited that and was killed after 30 s: a shell's `trap '' TERM` is handed down through every program to the server."""
    program = tmp_path / "python"
    program.write_text(f'#!/bin/sh\necho $$ > {tmp_path}/pid\necho "Serving m at http://h:1" >&2\nexec sleep 600\n')
    program.chmod(0o700)
    monkeypatch.setattr(child, "COMMAND", (str(program),))
    monkeypatch.setattr(child, "STOP_TIMEOUT_S", 600)  # longer than the test may take
    before = signal.signal(signal.SIGTERM, signal.SIG_IGN)
    try:
        with started_server("m"):
            os.kill(os.getpid(), signal.SIGTERM)  # is ignored, as before
        assert signal.getsignal(signal.SIGTERM) is signal.SIG_IGN
    finally:
        signal.signal(signal.SIGTERM, before)
    with pytest.raises(ProcessLookupError):
        os.kill(int((tmp_path / "pid").read_text()), 0)


@pytest.mark.slow
def test_server_starts_where_no_process_can_ask_for_its_cpus(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """macOS, as far as it can be had on Linux: every process of the deployment starts without the calls that are not there."""
    (tmp_path / "sitecustomize.py").write_text("import os\ndel os.sched_getaffinity, os.sched_setaffinity\n")
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join(filter(None, [str(tmp_path), os.environ.get("PYTHONPATH")])))
    seen = subprocess.run([*COMMAND[:-2], "-c", "import os; print(hasattr(os, 'sched_getaffinity'))"], capture_output=True, text=True)
    assert seen.stdout == "False\n", seen
    with started_server(None, ["--max-model-len", "128"]) as url:
        assert ApiClient(url).models() == ["headrace-tiny"]


@pytest.mark.slow
def test_a_second_ctrl_c_is_announced_and_ends_streams_with_an_error_event(tmp_path: Path) -> None:
    command = [*COMMAND, "serve", "--port", "0", "--drain-timeout", "600"]
    log = tmp_path / "log"
    with log.open("w") as stderr:
        process = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=stderr, process_group=0)
    while (found := child.URL_LINE.search(log.read_text())) is None:
        assert process.poll() is None, log.read_text()
        time.sleep(0.05)
    url = found.group(1)
    asked = {"model": "headrace-tiny", "messages": [{"role": "user", "content": "hi"}], "max_tokens": 1900, "n": 16}
    answer = ApiClient(url).chat({**asked, "ignore_eos": True})
    next(answer)

    def stop() -> None:
        process.send_signal(signal.SIGINT)
        time.sleep(DUPLICATE_SIGNAL_S + 0.1)
        process.send_signal(signal.SIGINT)

    stopping = threading.Thread(target=stop)
    stopping.start()
    # Read all the while: a client that does not, on a fast machine, is cut off for that before the second signal comes.
    try:
        with pytest.raises(ServerFailed, match="shut down before the answer was complete"):
            list(answer)
    finally:
        stopping.join()
    assert process.wait(30) == 75
    assert "draining 1 request for up to 600 s; Ctrl-C again ends them now" in log.read_text()


@pytest.mark.slow
def test_server_answers_inside_the_block_and_is_gone_after_it() -> None:
    with started_server(None, ["--max-model-len", "128"]) as url:
        client = ApiClient(url)
        assert client.models() == ["headrace-tiny"]
        text = list(client.chat({"model": "headrace-tiny", "messages": [{"role": "user", "content": "hi"}], "max_tokens": 4}))
        assert text
    with pytest.raises(ServerFailed):
        client.models()
