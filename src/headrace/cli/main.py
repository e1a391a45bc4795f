"""Runs the `headrace` command: lists its sub-commands, and turns their errors into exit codes (`cli.exits`).

Modules of sub-commands import torch, Numba, HTTP and YAML inside functions only, so that `--help` and shell completion answer at once.
"""

from __future__ import annotations

import sys
from typing import Annotated

import typer
from typer.main import get_command

from headrace import __version__
from headrace.cli.agent import agent
from headrace.cli.bench import bench_app
from headrace.cli.cache import cache_app
from headrace.cli.chat import chat
from headrace.cli.config_commands import config_app
from headrace.cli.control import drain, reload, rollout, scale, status
from headrace.cli.doctor import doctor
from headrace.cli.engine import engine
from headrace.cli.exits import report
from headrace.cli.gateway import gateway
from headrace.cli.keys import keys_app
from headrace.cli.log import log_app
from headrace.cli.models import models
from headrace.cli.plan import plan
from headrace.cli.replay import replay
from headrace.cli.serve import serve
from headrace.cli.simulate import simulate
from headrace.cli.suggestions import SuggestingGroup
from headrace.cli.tenants import tenants_app
from headrace.cli.tls import tls_app
from headrace.cli.usage import usage
from headrace.cli.values_of_flags import refuse_missing_values
from headrace.cli.vllm_flags import translated
from headrace.core.errors import HeadraceError
from headrace.machine.standard_streams import OutputLost, prepare_standard_streams

app = typer.Typer(
    name="headrace",
    cls=SuggestingGroup,
    help="Turns weights and whatever hardware there is into a fast, fair, observable, OpenAI-compatible token API.",
    epilog="Exit codes: 0 done, 1 failed, 2 wrong usage, 3 configuration or weights refused, 4 server unreachable, 75 drain cut short, "
    "130 interrupted.",
    no_args_is_help=True,
    rich_markup_mode=None,  # plain help: Rich costs 0.2 s and cuts long flag names
    pretty_exceptions_enable=False,
    # Underscores are dashes, as in vLLM; flag names come here without their leading dashes.
    context_settings={"help_option_names": ["-h", "--help"], "token_normalize_func": lambda name: name.replace("_", "-")},
)
app.command()(serve)
app.command()(engine)
app.command()(gateway)
app.command()(status)
app.command()(reload)
app.command()(rollout)
app.command()(scale)
app.command()(drain)
app.command()(chat)
app.command()(agent)
app.command()(models)
app.command()(plan)
app.command()(simulate)
app.command()(usage)
app.command()(doctor)
app.command()(replay)
app.add_typer(bench_app, name="bench")
app.add_typer(cache_app, name="cache")
app.add_typer(config_app, name="config")
app.add_typer(keys_app, name="keys")
app.add_typer(tenants_app, name="tenants")
app.add_typer(log_app, name="log")
app.add_typer(tls_app, name="tls")


def _show_version(wanted: bool) -> None:
    if wanted:
        print(f"headrace {__version__}")
        raise typer.Exit


@app.command("version")
def _version() -> None:
    """Show the version."""
    _show_version(True)


@app.callback()
def _root(
    version: Annotated[bool, typer.Option("--version", callback=_show_version, is_eager=True, help="Show the version and leave.")] = False,
) -> None:
    pass


def main() -> None:
    """Entry point of the installed script."""
    prepare_standard_streams()
    try:
        try:
            _run()
        finally:
            sys.stdout.flush()
    except OutputLost as error:
        sys.exit(report(error))


def _run() -> None:
    try:
        command = get_command(app)
        refuse_missing_values(command, sys.argv[1:])
        arguments, notices = translated(sys.argv[1:])
        for notice in notices:
            print(f"headrace: {notice}", file=sys.stderr)
        command(args=arguments, prog_name="headrace")
    except HeadraceError as error:
        sys.exit(report(error))


if __name__ == "__main__":
    main()
