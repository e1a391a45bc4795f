"""Declares the flags of commands that also reach a deployment on another machine (docs/control.md, "Over TCP")."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Annotated

import typer

from headrace.cli.exits import UsageRefused

AdminUrl = Annotated[
    str | None, typer.Option("--admin", metavar="URL", help="A deployment on another machine, as its admin.listen says: https://HOST:PORT.")
]
AdminFiles = Annotated[
    Path | None, typer.Option("--tls-dir", metavar="DIR", help="With --admin: the folder of ca.crt, tls.crt, tls.key and token.")
]


UNITS = {"s": 1, "m": 60, "h": 3600, "d": 86_400, "w": 7 * 86_400}


def seconds_of(text: str, flag: str) -> float:
    """Seconds of a duration such as "30d". Raises UsageRefused, which names the flag, for any other text."""
    found = re.fullmatch(r"(\d{1,9}(?:\.\d{1,3})?)([smhdw])", text)
    if found is None:
        raise UsageRefused(f"{flag}: {text!r} is no time. Write a number and s, m, h, d or w: 30d.")
    return float(found[1]) * UNITS[found[2]]
