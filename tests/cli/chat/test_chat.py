"""Tests the chat: what is sent, what is printed, what commands change; then the command itself, through a pipe and in a terminal."""

from __future__ import annotations

import io
import json
import os
import pty
import select
import signal
import subprocess
import sys
import termios
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import psutil
import pytest
from typer.testing import CliRunner

from headrace.cli.chat import child
from headrace.cli.chat.client import ApiClient, server_root
from headrace.cli.chat.session import ChatSession
from headrace.cli.exits import CommandExitCode, ServerFailed
from headrace.cli.main import app
from tests.cli.conftest import Headrace
from tests.cli.scripted import ScriptedServer, scripted_server
from tests.house.reader import ROOT

pytestmark = pytest.mark.socket


@pytest.mark.parametrize(
    ("url", "root"),
    [
        ("localhost:8000", "http://localhost:8000"),
        ("https://host/v1/", "https://host"),
        ("http://[::1]:8000/v1", "http://[::1]:8000"),
        ("http://host/models/v1", "http://host/models"),
        ("host/v1beta", "http://host/v1beta"),
    ],
)
@pytest.mark.pure
def test_the_root_of_a_server_is_found_in_what_people_write(url: str, root: str) -> None:
    assert server_root(url) == root


@pytest.mark.parametrize("url", ["ftp://host", "http://", "http://host:port", "http://host?key=1", "unix:///run/x"])
@pytest.mark.pure
def test_what_is_no_server_is_refused_with_an_example(url: str) -> None:
    with pytest.raises(ServerFailed, match="like http://127"):
        server_root(url)


@pytest.mark.parametrize("url", ["http://me:hunter2@host:8000", "me:hunter2@host/v1", "https://hunter2@host"])
@pytest.mark.pure
def test_credentials_in_a_url_are_refused_and_not_repeated(url: str) -> None:
    """They were kept in the client's url, which messages and the JSON of `bench serve` show."""
    with pytest.raises(ServerFailed, match="--api-key") as refused:
        server_root(url)
    assert "hunter2" not in str(refused.value)


def session_with(server: ScriptedServer) -> tuple[ChatSession, io.StringIO]:
    out = io.StringIO()
    return ChatSession(ApiClient(server.url, api_key="sk-1"), "tiny", out=out), out


def test_conversation_is_sent_whole_and_streamed_out() -> None:
    with scripted_server(["Hel", "lo"], ["Again"]) as server:
        session, out = session_with(server)
        assert session.handle("/system Be brief.")
        assert session.handle("Hi")
        assert session.handle("And now?")
        assert out.getvalue() == "System message set.\nHello\nAgain\n"
        assert server.seen[1]["messages"] == [
            {"role": "system", "content": "Be brief."},
            {"role": "user", "content": "Hi"},
            {"role": "assistant", "content": "Hello"},
            {"role": "user", "content": "And now?"},
        ]
        assert server.seen[1]["model"] == "tiny"
        assert server.keys == ["Bearer sk-1", "Bearer sk-1"]


def test_clear_forgets_messages_and_keeps_the_system_message() -> None:
    with scripted_server(["a"], ["b"]) as server:
        session, _ = session_with(server)
        for line in ("/system S", "one", "/clear", "two"):
            assert session.handle(line)
        assert server.seen[1]["messages"] == [{"role": "system", "content": "S"}, {"role": "user", "content": "two"}]


def test_parameters_are_checked_before_they_are_sent() -> None:
    with scripted_server(["a"]) as server:
        session, out = session_with(server)
        for line in ("/set temperature 0.5", "/set stop END", "/set seed 7", "/set top_p 2", "/set colour red", "/set max_tokens many"):
            assert session.handle(line)
        assert session.handle("/set seed default")
        assert session.handle("go")
        sent = server.seen[0]
        assert (sent["temperature"], sent["stop"]) == (0.5, "END")
        assert not {"seed", "top_p", "colour", "max_tokens"} & set(sent)
        printed = out.getvalue()
        assert "0 <= top_p <= 1" in printed
        assert "colour cannot be set" in printed
        assert "'many' is not a number" in printed


def test_failed_question_is_forgotten() -> None:
    with scripted_server(429, ["half", "<break>"], ["x", "<error>"], ["fine"]) as server:
        session, _ = session_with(server)
        for reason in ("answered 429: the queue is full", "broke off", "replica lost"):
            with pytest.raises(ServerFailed, match=reason):
                session.handle("question")
        assert session.handle("question")
        assert server.seen[3]["messages"] == [{"role": "user", "content": "question"}]


def test_model_can_be_changed_among_those_served() -> None:
    with scripted_server() as server:
        session, out = session_with(server)
        session.handle("/model absent")
        session.handle("/model other")
        assert session.model == "other"
        assert "absent is not served" in out.getvalue()
        assert out.getvalue().endswith("  tiny\n* other\n")


def test_quit_leaves_and_unknown_commands_are_named() -> None:
    with scripted_server() as server:
        session, out = session_with(server)
        assert not session.handle("/quit")
        assert session.handle("/dance")
        assert "Unknown command /dance" in out.getvalue()


def test_chat_works_in_a_pipe(headrace: Headrace) -> None:
    with scripted_server(["Paris", "."], ["Rome"]) as server:
        done = headrace("chat", "--url", server.url, "--model", "other", text="capital of France?\n\nof Italy?\n/quit\nnever sent\n")
    assert (done.returncode, done.stdout, done.stderr) == (0, "Paris.\nRome\n", "")
    assert [body["model"] for body in server.seen] == ["other", "other"]


def test_chat_exits_with_the_servers_failure(headrace: Headrace) -> None:
    with scripted_server(429) as server:
        done = headrace("chat", "--url", server.url, text="hi\n")
    assert done.returncode == CommandExitCode.SERVER
    assert "answered 429: the queue is full" in done.stderr
    done = headrace("chat", "--url", server.url, text="hi\n")
    assert done.returncode == CommandExitCode.SERVER
    assert "Is a server running there?" in done.stderr
    done = headrace("chat", "folder", "--url", server.url)
    assert done.returncode == CommandExitCode.USAGE


@pytest.mark.parametrize("keys", ["sk-of-the-shell", "sk-of-the-shell sk-another"])
def test_a_server_started_for_a_chat_is_asked_with_the_key_it_was_started_with(monkeypatch: pytest.MonkeyPatch, keys: str) -> None:
    started: list[tuple[str | None, str | None]] = []

    @contextmanager
    def start(model: str | None, *, api_key: str | None = None) -> Iterator[str]:
        started.append((model, api_key))
        yield server.url

    monkeypatch.setattr(child, "started_server", start)
    monkeypatch.setenv("HEADRACE_API_KEY", keys)
    with scripted_server(["Hi"]) as server:
        done = CliRunner().invoke(app, ["chat", "some/folder"], input="hello\n")
    assert (done.exit_code, done.stdout) == (0, "Hi\n"), done.output
    assert started == [("some/folder", "sk-of-the-shell")]
    assert server.keys == ["Bearer sk-of-the-shell"]


@pytest.fixture
def _heard_interrupts() -> Iterator[None]:
    """Tests run in the background of a shell may inherit SIGINT ignored, and pass that on. What a terminal starts hears it."""
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    yield
    signal.signal(signal.SIGINT, before)


STAND_IN = """
import json, sys, threading
sys.path.insert(0, sys.argv[1])
from tests.cli.conftest import Headrace
from tests.cli.scripted import ScriptedServer

class Seen(list):
    def append(self, body):
        with open(sys.argv[2], "a") as file:
            print(json.dumps(body["messages"]), file=file)

server = ScriptedServer([["one", " two", "<wait>"], ["fine"]], ["tiny"])
server.seen = Seen()
print("Serving tiny at", server.url, file=sys.stderr, flush=True)
server.serve_forever(0.01)  # ends on SIGTERM, and would on SIGINT
"""
WITH_ITS_OWN_SERVER = """
import fcntl, sys, termios
fcntl.ioctl(0, termios.TIOCSCTTY, 0)
from headrace.cli.chat import child
child.COMMAND = (sys.executable, *sys.argv[1:])
sys.argv = ["headrace", "chat", "some-folder"]
from headrace.cli.main import main
main()
"""


class Terminal:
    """The outer end of a terminal, and the command at its inner end."""

    def __init__(self, descriptor: int, process: subprocess.Popen[bytes]) -> None:
        self._descriptor = descriptor
        self._process = psutil.Process(process.pid)
        self._unread = ""

    def type(self, keys: bytes) -> None:
        os.write(self._descriptor, keys)

    def read_until(self, word: str) -> str:
        """What it shows next, up to and including `word`; nothing new for a minute is a failure."""
        while word not in self._unread:
            assert self._read(), f"{word!r} was not shown before the end: {self._unread}"
        before, _, self._unread = self._unread.partition(word)
        return before + word

    def read_prompt(self) -> str:
        """What it shows up to the prompt, once keys are waited for: a Ctrl-C that comes between the two is not heard until the next key."""
        shown = self.read_until("> ")
        end_at = time.monotonic() + 60.0
        while termios.tcgetattr(self._descriptor)[3] & termios.ICANON or self._process.status() != psutil.STATUS_SLEEPING:
            assert time.monotonic() < end_at, f"no key is waited for after {shown}"
            time.sleep(0.01)
        return shown

    def read_to_the_end(self) -> str:
        while self._read():
            pass
        return self._unread

    def _read(self) -> bool:
        """Whether the command still has the other end."""
        assert select.select([self._descriptor], [], [], 60.0)[0], f"nothing new was shown after {self._unread}"
        try:
            self._unread += os.read(self._descriptor, 4096).decode()
        except OSError:
            return False
        return True


@pytest.mark.process
@pytest.mark.usefixtures("_heard_interrupts")
def test_a_terminal_prompts_and_ctrl_c_stops_an_answer_and_not_the_chats_own_server(tmp_path: Path) -> None:
    """The terminal sends it to the whole process group in the foreground: the server was in it, and the conversation was lost."""
    stand_in, seen = tmp_path / "stand_in.py", tmp_path / "seen"
    stand_in.write_text(STAND_IN)
    outer, inner = pty.openpty()
    command = [sys.executable, "-c", WITH_ITS_OWN_SERVER, str(stand_in), str(ROOT), str(seen)]
    process = subprocess.Popen(command, stdin=inner, stdout=inner, stderr=inner, start_new_session=True)
    os.close(inner)
    terminal, interrupt = Terminal(outer, process), b"\x03"
    try:
        assert "Talking to tiny" in terminal.read_prompt()
        terminal.type(b"count\n")
        terminal.read_until("one two")
        terminal.type(interrupt)
        assert "[stopped]" in terminal.read_prompt()
        terminal.type(interrupt)
        assert "Ctrl-C again to leave" in terminal.read_prompt()
        terminal.type(b"go on\n")
        assert "fine" in terminal.read_prompt()
        terminal.type(interrupt)  # what was typed between is no first one of two
        assert "Ctrl-C again to leave" in terminal.read_prompt()
        terminal.type(interrupt)
        assert "Traceback" not in terminal.read_to_the_end()
        assert process.wait(60) == CommandExitCode.INTERRUPTED
    finally:
        process.kill()
        os.close(outer)
    first, second = map(json.loads, seen.read_text().splitlines())
    assert [message["content"] for message in first] == ["count"]
    assert [(message["role"], message["content"]) for message in second[1:]] == [("assistant", "one two"), ("user", "go on")]
