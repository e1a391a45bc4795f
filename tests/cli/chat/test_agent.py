"""Tests the agent: what is sent after a call, what is printed, when it ends; then the command itself."""

from __future__ import annotations

import io
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from headrace.cli.chat.client import ApiClient
from headrace.cli.chat.session import STOPPED, ChatSession
from headrace.cli.exits import CommandExitCode, ServerFailed
from headrace.cli.main import app
from headrace.functions import PythonFunction, functions_in
from tests.cli.conftest import Headrace
from tests.cli.scripted import Delta, ScriptedServer, scripted_server

pytestmark = pytest.mark.socket

TOOLS = '''
def capital(country: str) -> str:
    """The capital of a country."""
    return {"France": "Paris"}[country]

def stop() -> str:
    raise KeyboardInterrupt
'''


@pytest.fixture
def functions(tmp_path: Path) -> dict[str, PythonFunction]:
    path = tmp_path / "tools.py"
    path.write_text(TOOLS)
    return functions_in(path)


def calls(*given: tuple[str, str], first: int = 0) -> list[Delta | str]:
    """An answer that calls functions, each in three pieces as servers stream them."""
    pieces: list[Delta | str] = []
    for number, (name, arguments) in enumerate(given, first):
        half = len(arguments) // 2
        pieces.append(
            {"tool_calls": [{"index": number, "id": f"c{number}", "type": "function", "function": {"name": name, "arguments": ""}}]}
        )
        pieces += [{"tool_calls": [{"index": number, "function": {"arguments": text}}]} for text in (arguments[:half], arguments[half:])]
    return pieces


def call(number: int, name: str, arguments: str) -> dict[str, Any]:
    return {"id": f"c{number}", "type": "function", "function": {"name": name, "arguments": arguments}}


def session_with(
    server: ScriptedServer, functions: dict[str, PythonFunction], max_rounds: int = 3
) -> tuple[ChatSession, io.StringIO, io.StringIO]:
    out, log = io.StringIO(), io.StringIO()
    return ChatSession(ApiClient(server.url), "tiny", functions, max_rounds=max_rounds, out=out, log=log), out, log


def test_a_call_is_made_and_its_result_is_sent_back(functions: dict[str, PythonFunction]) -> None:
    with scripted_server(calls(("capital", '{"country": "France"}')), ["It is ", "Paris."]) as server:
        session, out, log = session_with(server, functions)
        session.ask("Capital of France?")
        assert out.getvalue() == "It is Paris.\n"
        assert log.getvalue() == '-> capital({"country": "France"})\n<- Paris\n'
        first, second = server.seen
        assert [tool["function"]["name"] for tool in first["tools"]] == ["capital", "stop"]  # type: ignore[attr-defined]
        assert first["tool_choice"] == "auto"
        assert second["messages"] == [
            {"role": "user", "content": "Capital of France?"},
            {"role": "assistant", "content": None, "tool_calls": [call(0, "capital", '{"country": "France"}')]},
            {"role": "tool", "tool_call_id": "c0", "content": "Paris"},
        ]
        assert session.messages[-1] == {"role": "assistant", "content": "It is Paris."}


def test_every_call_of_an_answer_is_made_and_failures_go_to_the_model(functions: dict[str, PythonFunction]) -> None:
    answer = ["Let me see.", *calls(("capital", '{"country": "Mars"}'), ("nothing", "{}"), ("capital", '{"land": 1}'))]
    with scripted_server(answer, ["Sorry."]) as server:
        session, out, _ = session_with(server, functions)
        session.ask("Capital of Mars?")
        assert out.getvalue() == "Let me see.\nSorry.\n"
        results = [message["content"] for message in session.messages if message["role"] == "tool"]
        assert results[0] == "error: KeyError: 'Mars'"
        assert results[1] == "error: there is no function nothing; there are: capital, stop"
        assert str(results[2]).startswith("error: the arguments do not fit: ")


def test_rounds_are_bounded_and_the_last_answer_is_text(functions: dict[str, PythonFunction]) -> None:
    again = calls(("capital", '{"country": "France"}'))
    with scripted_server(again, again, ["Enough."]) as server:
        session, out, _ = session_with(server, functions, max_rounds=2)
        session.ask("Go on.")
        assert out.getvalue() == "Enough.\n"
        assert [seen["tool_choice"] for seen in server.seen] == ["auto", "auto", "none"]


def test_an_interrupted_call_ends_the_question_and_every_call_has_an_answer(functions: dict[str, PythonFunction]) -> None:
    with scripted_server(calls(("stop", "{}"), ("capital", '{"country": "France"}')), ["Hello."]) as server:
        session, out, _ = session_with(server, functions)
        session.ask("Stop!")
        assert out.getvalue() == " [stopped]\n"
        assert [message["content"] for message in session.messages if message["role"] == "tool"] == [STOPPED, STOPPED]
        session.ask("Hi")
        assert out.getvalue().endswith("Hello.\n")


def test_a_failed_question_is_forgotten_whole(functions: dict[str, PythonFunction]) -> None:
    with scripted_server(calls(("capital", '{"country": "France"}')), 500) as server:
        session, _, _ = session_with(server, functions)
        with pytest.raises(ServerFailed):
            session.ask("Capital of France?")
        assert session.messages == []


def test_the_command_prints_answers_to_stdout_and_calls_to_stderr(headrace: Headrace, tmp_path: Path) -> None:
    path = tmp_path / "tools.py"
    path.write_text(TOOLS)
    with scripted_server(calls(("capital", '{"country": "France"}')), ["Paris."]) as server:
        done = headrace("agent", "--tool", str(path), "--url", server.url, text="Capital of France?\n")
    assert (done.returncode, done.stdout) == (0, "Paris.\n"), done.stderr
    assert "-> capital" in done.stderr


@pytest.mark.parametrize(
    ("words", "code", "reason"),
    [
        ([], CommandExitCode.USAGE, "--tool FILE.py: give a file"),
        (["--tool", "{tmp}/missing.py"], CommandExitCode.USAGE, "a Python file"),
        (["--tool", "{tmp}/tools.py", "--tool", "{tmp}/same.py"], CommandExitCode.USAGE, "capital is defined in two files"),
    ],
)
@pytest.mark.pure
def test_files_without_functions_are_refused_before_a_server_is_asked(
    headrace: Headrace, tmp_path: Path, words: list[str], code: int, reason: str
) -> None:
    for name in ("tools.py", "same.py"):
        (tmp_path / name).write_text(TOOLS)
    done = headrace("agent", *[word.replace("{tmp}", str(tmp_path)) for word in words])
    assert done.returncode == code
    assert reason in done.stderr


@pytest.mark.pure
def test_help_names_the_option() -> None:
    assert "--tool" in CliRunner().invoke(app, ["agent", "--help"]).stdout
