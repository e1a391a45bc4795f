"""A server started for one command: it answers inside the block and is gone after it."""

from __future__ import annotations

import os
import subprocess
from pathlib import Path

import pytest

from headrace.cli import child
from headrace.cli.child import started_server
from headrace.cli.client import ApiClient
from headrace.cli.exits import ServerFailed
from headrace.fleet.config import COMMAND
from tests.house.stand_in import stand_in


def test_server_that_cannot_start_tells_its_last_words() -> None:
    with pytest.raises(ServerFailed, match=r"ended before it answered\n.*neither a folder with a config.json"), started_server("/absent"):
        pass


def test_server_is_told_its_key_where_other_users_cannot_read_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The stand-in says what it found: its URL's host is the key, its port the number of arguments."""
    program = tmp_path / "python"
    program.write_text('#!/bin/sh\necho "Serving m at http://$HEADRACE_API_KEY:$#"\nexec sleep 60\n')
    program.chmod(0o700)
    monkeypatch.setattr(child, "COMMAND", (str(program),))
    monkeypatch.setenv("HEADRACE_API_KEY", "of-the-shell")
    for key, said in (("given", "given"), (None, "of-the-shell")):
        with started_server("folder", api_key=key) as url:
            assert url == f"http://{said}:4"


@pytest.mark.slow
def test_server_starts_where_no_process_can_ask_for_its_cpus(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """macOS, as far as it can be had on Linux: every process of the deployment starts without the calls that are not there."""
    (tmp_path / "sitecustomize.py").write_text("import os\ndel os.sched_getaffinity, os.sched_setaffinity\n")
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join(filter(None, [str(tmp_path), os.environ.get("PYTHONPATH")])))
    seen = subprocess.run([*COMMAND[:-2], "-c", "import os; print(hasattr(os, 'sched_getaffinity'))"], capture_output=True, text=True)
    assert seen.stdout == "False\n", seen
    made = stand_in(tmp_path)
    arguments = ["--max-model-len", "128"] if made is None else ["--max-model-len", "128", "--load-format", made[1]]
    with started_server(None if made is None else made[0], arguments) as url:
        assert ApiClient(url).models() == ["headrace-tiny"]


@pytest.mark.slow
def test_server_answers_inside_the_block_and_is_gone_after_it(tmp_path: Path) -> None:
    made = stand_in(tmp_path)
    arguments = ["--max-model-len", "128"] if made is None else ["--max-model-len", "128", "--load-format", made[1]]
    with started_server(None if made is None else made[0], arguments) as url:
        client = ApiClient(url)
        assert client.models() == ["headrace-tiny"]
        text = list(client.chat({"model": "headrace-tiny", "messages": [{"role": "user", "content": "hi"}], "max_tokens": 4}))
        assert text
    with pytest.raises(ServerFailed):
        client.models()
