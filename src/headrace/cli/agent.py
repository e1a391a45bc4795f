"""`headrace agent` holds a conversation in the terminal, in which the model may call Python functions of local files.

Everything else is as in `headrace chat` (`cli.chat`): the server it talks to, Ctrl-C, and pipes, where only answers go to stdout. Calls and
their results are printed to stderr.
"""

from __future__ import annotations

import sys
from contextlib import ExitStack
from pathlib import Path
from typing import Annotated

import typer

from headrace.cli.chat import chosen_model, client_of, converse
from headrace.cli.client_key import ClientKey

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
    from headrace.cli.agent_session import AgentSession
    from headrace.cli.exits import UsageRefused
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
        session = AgentSession(client, chosen_model(client, served_name), functions, max_rounds=max_rounds, out=sys.stdout, log=sys.stderr)
        session.system = system
        raise typer.Exit(converse(session, is_terminal=sys.stdin.isatty()))
