"""`headrace doctor` says what this machine offers, what will be slow or fail, and what to do about it. Nothing is started or changed."""

from __future__ import annotations

import json
from dataclasses import asdict
from typing import Annotated

import typer

from headrace.cli.exits import CommandExitCode


def doctor(
    port: Annotated[int, typer.Option("--port", help="Port that should be free.")] = 8000,
    as_json: Annotated[bool, typer.Option("--json", help="Machine-readable.")] = False,
) -> None:
    """Check this machine; exit 1 when something will fail."""
    from headrace.cli.doctor_checks import Health, examine

    findings = examine(port)
    if as_json:
        print(json.dumps([asdict(finding) for finding in findings], indent=2))
    else:
        for finding in findings:
            print(f"{finding.health.value:>5}  {finding.name}: {finding.found}" + (f"\n       {finding.remedy}" if finding.remedy else ""))
    if any(finding.health is Health.FAIL for finding in findings):
        raise typer.Exit(CommandExitCode.FAILED)
