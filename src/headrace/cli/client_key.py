"""Declares the flag `--api-key` of the commands that are clients of a server (chat, agent, bench serve)."""

from __future__ import annotations

from typing import Annotated

import typer


def first_key(given: str | None) -> str | None:
    """The first key of a list separated by blanks. `HEADRACE_API_KEY` may hold all keys that `serve` accepts, and a client sends one."""
    return next(iter((given or "").split()), None)


ClientKey = Annotated[str | None, typer.Option("--api-key", envvar="HEADRACE_API_KEY", callback=first_key, help="Sent as a bearer token.")]
