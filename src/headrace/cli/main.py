"""Runs the `headrace` command: lists its sub-commands, and turns their errors into exit codes (`cli.exits`).

Modules of sub-commands import torch, Numba, HTTP and YAML inside functions only, so that `--help` and shell completion answer at once.
"""

from __future__ import annotations

import sys
from typing import Annotated

import typer
from typer.main import get_command

from headrace import __version__
from headrace.cli.admin.control import drain, reload, rollout, scale, status
from headrace.cli.admin.keys import keys_app
from headrace.cli.admin.tenants import cache_app, tenants_app
from headrace.cli.admin.tls import tls_app
from headrace.cli.admin.usage import log_app, usage
from headrace.cli.bench.offline import latency, steps, throughput
from headrace.cli.bench.serve import serve as bench_serve
from headrace.cli.chat.chat import agent, chat
from headrace.cli.config.commands import config_app
from headrace.cli.doctor import doctor
from headrace.cli.exits import report
from headrace.cli.flags.help import GroupedCommand, SuggestingGroup
from headrace.cli.flags.vllm import refuse_missing_values, translated
from headrace.cli.models import models
from headrace.cli.planner.plan import plan
from headrace.cli.planner.simulate import simulate
from headrace.cli.replay import replay
from headrace.cli.servers.engine import engine
from headrace.cli.servers.gateway import gateway
from headrace.cli.servers.serve import serve
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
app.command(cls=GroupedCommand)(serve)
app.command(cls=GroupedCommand)(engine)
app.command(cls=GroupedCommand)(gateway)
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
bench_app = typer.Typer(help="Measure a server, or the engine in this process.", no_args_is_help=True, rich_markup_mode=None)
bench_app.command(name="serve")(bench_serve)
bench_app.command(cls=GroupedCommand)(throughput)
bench_app.command(cls=GroupedCommand)(latency)
bench_app.command(cls=GroupedCommand)(steps)
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
