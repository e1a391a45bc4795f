"""`headrace chat` and `headrace agent` hold a conversation in the terminal; the agent's model may call Python functions of local files.

In a pipe each input line is a message and only answers go to stdout, so that `echo hi | headrace chat` works in scripts. Ctrl-C during an
answer stops that answer; at the prompt a second Ctrl-C leaves. A server that was started for the chat gets no Ctrl-C: it is stopped when
the chat ends.
"""

from __future__ import annotations

import sys
from contextlib import ExitStack
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from headrace.cli.exits import ServerFailed, UsageRefused, report

if TYPE_CHECKING:
    from headrace.cli.chat.client import ApiClient
    from headrace.cli.chat.session import ChatSession


def first_key(given: str | None) -> str | None:
    """The first key of a list separated by blanks. `HEADRACE_API_KEY` may hold all keys that `serve` accepts, and a client sends one."""
    return next(iter((given or "").split()), None)


ClientKey = Annotated[str | None, typer.Option("--api-key", envvar="HEADRACE_API_KEY", callback=first_key, help="Sent as a bearer token.")]


DEFAULT_URL = "http://127.0.0.1:8000"


def chat(
    model: Annotated[
        str | None, typer.Argument(help="Folder to serve for this chat; default: the server that runs here, else the bundled model.")
    ] = None,
    url: Annotated[str | None, typer.Option("--url", help="Root of a running OpenAI-compatible server.")] = None,
    served_name: Annotated[str | None, typer.Option("--model", help="Served model to ask; default: the first one listed.")] = None,
    system: Annotated[str | None, typer.Option("--system", help="System message.")] = None,
    api_key: ClientKey = None,
) -> None:
    """Talk to a model in the terminal."""
    from headrace.cli.chat.session import ChatSession

    with ExitStack() as stack:
        client = client_of(stack, model, url, api_key)
        session = ChatSession(client, chosen_model(client, served_name), out=sys.stdout)
        session.system = system
        raise typer.Exit(converse(session, is_terminal=sys.stdin.isatty()))


def client_of(stack: ExitStack, model: str | None, url: str | None, api_key: str | None) -> ApiClient:
    """A client of the server at `url`, else at DEFAULT_URL, else of one that is started here and stopped when `stack` closes."""
    from headrace.cli.chat.client import ApiClient

    if model is not None and url is not None:
        raise UsageRefused("MODEL and --url: give one of them. --model chooses among the models of a server")
    if url is not None:
        return ApiClient(url, api_key=api_key)
    running = ApiClient(DEFAULT_URL, api_key=api_key)
    if model is None and _answers(running):
        return running
    from headrace.cli.chat.child import started_server

    print(f"Starting {model or 'the bundled model'} ...", file=sys.stderr)
    return ApiClient(stack.enter_context(started_server(model, api_key=api_key)), api_key=api_key)


def chosen_model(client: ApiClient, served_name: str | None) -> str:
    """served_name: None: the first one. Raises ServerFailed if the server does not serve it"""
    names = client.models()
    if not names or (served_name is not None and served_name not in names):
        raise ServerFailed(f"{client.url} serves {', '.join(names) or 'no model'}, not {served_name or 'anything'}")
    return served_name or names[0]


def _answers(client: ApiClient) -> bool:
    try:
        client.models()
    except ServerFailed:
        return False
    return True


def converse(session: ChatSession, *, is_terminal: bool) -> int:
    """Read lines until the end of input or /quit. Returns the exit code: in a pipe, that of the last failure."""
    if is_terminal:
        print(f"Talking to {session.model} at {session.client.url}. /help lists commands.")
        _enable_line_editing()
    failed = 0
    is_warned = False  # the last thing typed at the prompt was Ctrl-C
    while True:
        try:
            line = input("> " if is_terminal else "")
        except EOFError:
            break
        except KeyboardInterrupt:
            if is_warned or not is_terminal:
                raise
            is_warned = True
            print("\n(Ctrl-C again to leave, or Ctrl-D.)")
            continue
        is_warned = False
        try:
            if not session.handle(line):
                break
        except ServerFailed as error:
            failed = report(error)
        except KeyboardInterrupt:  # it came as an answer ended, or during a command
            if not is_terminal:
                raise
            print()
    if is_terminal:
        print()
    return 0 if is_terminal else failed


def _enable_line_editing() -> None:
    try:
        import readline  # noqa: F401  # importing it gives input() history and editing
    except ImportError:
        return


MAX_ROUNDS = 8


def agent(
    model: Annotated[
        str | None, typer.Argument(help="Folder to serve for this agent; default: the server that runs here, else the bundled model.")
    ] = None,
    tool: Annotated[
        list[Path] | None, typer.Option("--tool", metavar="FILE.py", help="File whose functions may be called; it is run. Again for more.")
    ] = None,
    url: Annotated[str | None, typer.Option("--url", help="Root of a running OpenAI-compatible server.")] = None,
    served_name: Annotated[str | None, typer.Option("--model", help="Served model to ask; default: the first one listed.")] = None,
    system: Annotated[str | None, typer.Option("--system", help="System message.")] = None,
    max_rounds: Annotated[
        int, typer.Option("--max-rounds", min=1, help="Answers with calls per question; then the model must answer in text.")
    ] = MAX_ROUNDS,
    api_key: ClientKey = None,
) -> None:
    """Talk to a model that may call your Python functions."""
    from headrace.cli.chat.session import ChatSession
    from headrace.functions import PythonFunction, functions_in

    if not tool:
        raise UsageRefused("--tool FILE.py: give a file of Python functions that the model may call")
    functions: dict[str, PythonFunction] = {}
    for path in tool:
        for name, function in functions_in(path).items():
            if name in functions:
                raise UsageRefused(f"--tool {path}: {name} is defined in two files")
            functions[name] = function
    with ExitStack() as stack:
        client = client_of(stack, model, url, api_key)
        session = ChatSession(client, chosen_model(client, served_name), functions, max_rounds=max_rounds, out=sys.stdout, log=sys.stderr)
        session.system = system
        raise typer.Exit(converse(session, is_terminal=sys.stdin.isatty()))
