"""`python -m headrace`: the same as the installed command `headrace`."""

from __future__ import annotations

from headrace.cli.main import main

main()
