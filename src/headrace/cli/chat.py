"""`headrace chat` holds a conversation in the terminal, streamed over the HTTP API.

On a terminal the command prints a prompt and hints. In a pipe each input line is a message and only answers are printed, so that `echo hi |
headrace chat` works in scripts. Ctrl-C during an answer stops that answer; at the prompt a second Ctrl-C leaves. A server that was started
for the chat gets no Ctrl-C: it is stopped when the chat ends. `cli.chat_session` is the conversation itself.
"""

from __future__ import annotations

import sys
from contextlib import ExitStack
from typing import TYPE_CHECKING, Annotated

import typer

from headrace.cli.client_key import ClientKey
from headrace.cli.exits import ServerFailed, UsageRefused, report

if TYPE_CHECKING:
    from headrace.cli.chat_session import ChatSession
    from headrace.cli.client import ApiClient

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
    from headrace.cli.chat_session import ChatSession

    with ExitStack() as stack:
        client = client_of(stack, model, url, api_key)
        session = ChatSession(client, chosen_model(client, served_name), out=sys.stdout)
        session.system = system
        raise typer.Exit(converse(session, is_terminal=sys.stdin.isatty()))


def client_of(stack: ExitStack, model: str | None, url: str | None, api_key: str | None) -> ApiClient:
    """A client of the server at `url`. Without `url` and `model`, of the server that runs at DEFAULT_URL. Else of a server that is started
    here, and stopped when `stack` closes.

    Raises UsageRefused if both a model and a URL are given.
    """
    from headrace.cli.client import ApiClient

    if model is not None and url is not None:
        raise UsageRefused("MODEL and --url: give one of them. --model chooses among the models of a server")
    if url is not None:
        return ApiClient(url, api_key=api_key)
    running = ApiClient(DEFAULT_URL, api_key=api_key)
    if model is None and _answers(running):
        return running
    from headrace.cli.child import started_server

    print(f"Starting {model or 'the bundled model'} ...", file=sys.stderr)
    return ApiClient(stack.enter_context(started_server(model, api_key=api_key)), api_key=api_key)


def chosen_model(client: ApiClient, served_name: str | None) -> str:
    """The served model of this name; None: the first one. Raises ServerFailed if the server does not serve it."""
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
