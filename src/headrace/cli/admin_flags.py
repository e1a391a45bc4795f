"""Declares the flags of commands that also reach a deployment on another machine (docs/control.md, "Over TCP")."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

AdminUrl = Annotated[
    str | None, typer.Option("--admin", metavar="URL", help="A deployment on another machine, as its admin.listen says: https://HOST:PORT.")
]
AdminFiles = Annotated[
    Path | None, typer.Option("--tls-dir", metavar="DIR", help="With --admin: the folder of ca.crt, tls.crt, tls.key and token.")
]
