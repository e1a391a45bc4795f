"""Runs the `headrace` command: lists its sub-commands, and turns their errors into exit codes (`cli.exits`).

Modules of sub-commands import torch, Numba, HTTP and YAML inside functions only, so that `--help` and shell completion answer at once.
`--help` shows the options that are marked as common (`core.option`), `--help-all` the others too.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from difflib import get_close_matches
from typing import Annotated

import typer
from typer._click.core import Context, Parameter  # these have no public name that fits
from typer._click.exceptions import NoSuchOption
from typer._click.formatting import HelpFormatter
from typer.core import TyperCommand, TyperGroup, TyperOption
from typer.main import get_command

from headrace import __version__
from headrace.cli.admin.adapters import adapters_app
from headrace.cli.admin.control import drain, reload, rollout, scale, sleep, status, wake
from headrace.cli.admin.keys import keys_app
from headrace.cli.admin.tenants import cache_app, tenants_app
from headrace.cli.admin.tls import tls_app
from headrace.cli.admin.usage import log_app, usage
from headrace.cli.bench.offline import latency, steps, throughput
from headrace.cli.bench.serve import serve as bench_serve
from headrace.cli.bench.sweep import sweep
from headrace.cli.chat.chat import agent, chat
from headrace.cli.config.commands import config_app
from headrace.cli.doctor import doctor
from headrace.cli.exits import report
from headrace.cli.explain import explain
from headrace.cli.flags.flag import FURTHER
from headrace.cli.flags.vllm import TABLE, RefusedFlag, refuse_missing_values, translated
from headrace.cli.models import models
from headrace.cli.planner.plan import plan
from headrace.cli.planner.simulate import simulate
from headrace.cli.registry import registry_app
from headrace.cli.replay import replay
from headrace.cli.servers.engine import engine
from headrace.cli.servers.gateway import gateway
from headrace.cli.servers.serve import serve
from headrace.core.errors import HeadraceError
from headrace.machine.standard_streams import OutputLost, prepare_standard_streams

_SHOWS_ALL = "headrace.shows_all"


class GroupedCommand(TyperCommand):
    """A command with many options: `--help` shows the common ones by group."""

    def get_params(self, ctx: Context) -> list[Parameter]:
        text = "Show every option, and leave."
        every = TyperOption(param_decls=["--help-all"], is_flag=True, is_eager=True, expose_value=False, callback=_show_all, help=text)
        return [*super().get_params(ctx), every]

    def format_options(self, ctx: Context, formatter: HelpFormatter) -> None:
        groups: dict[str, list[tuple[str, str]]] = {"Arguments": []}
        for param in self.get_params(ctx):
            default = "Arguments" if param.param_type_name == "argument" else "Options"
            if (record := param.get_help_record(ctx)) is not None:
                groups.setdefault(getattr(param, "rich_help_panel", None) or default, []).append(record)
        for heading, records in sorted(groups.items(), key=lambda group: group[0] == "Options"):
            if records and (_SHOWS_ALL in ctx.meta or not heading.endswith(FURTHER)):
                with formatter.section(heading):
                    formatter.write_dl(records)


def _show_all(ctx: Context, param: Parameter, is_given: bool) -> None:
    if is_given and not ctx.resilient_parsing:
        ctx.meta[_SHOWS_ALL] = True
        typer.echo(ctx.get_help(), color=ctx.color)
        ctx.exit()


class SuggestingGroup(TyperGroup):
    """Answers an unknown flag, of the group or of a command, with the nearest known one, or with what to do instead of vLLM's."""

    def parse_args(self, ctx: Context, args: list[str]) -> list[str]:
        with _nearest_flag_suggested():
            return super().parse_args(ctx, args)

    def invoke(self, ctx: Context) -> object:
        with _nearest_flag_suggested():
            return super().invoke(ctx)


@contextmanager
def _nearest_flag_suggested() -> Iterator[None]:
    try:
        yield
    except NoSuchOption as error:
        params = error.ctx.command.params if error.ctx else []
        known = [name for param in params for name in (*param.opts, *param.secondary_opts)]
        for nearest in get_close_matches(error.option_name, [*known, *TABLE], n=1):
            entry = TABLE.get(nearest)
            error.message += f". {entry.message(nearest)}" if isinstance(entry, RefusedFlag) else f". Did you mean {nearest}?"
        error.possibilities = None  # the parser's own suggestions
        raise


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
COMMANDS: tuple[Callable[..., None], ...] = (
    status,
    reload,
    rollout,
    scale,
    drain,
    sleep,
    wake,
    chat,
    agent,
    models,
    plan,
    simulate,
    usage,
    doctor,
    explain,
    replay,
)
GROUPS = {
    "adapters": adapters_app,
    "cache": cache_app,
    "config": config_app,
    "keys": keys_app,
    "tenants": tenants_app,
    "log": log_app,
    "tls": tls_app,
    "registry": registry_app,
}
bench_app = typer.Typer(help="Measure a server, or the engine in this process.", no_args_is_help=True, rich_markup_mode=None)
bench_app.command(name="serve")(bench_serve)
bench_app.command()(sweep)
for of_engine in (throughput, latency, steps):
    bench_app.command(cls=GroupedCommand)(of_engine)
for server in (serve, engine, gateway):
    app.command(cls=GroupedCommand)(server)
for command in COMMANDS:
    app.command()(command)
for name, group in {"bench": bench_app, **GROUPS}.items():
    app.add_typer(group, name=name)


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
