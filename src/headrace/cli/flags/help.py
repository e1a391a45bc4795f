"""What the parser shows: a command's options in groups, and in place of a misspelt flag the nearest of its own flags and vLLM's.

`--help` shows the options that are marked as common (`core.option`), `--help-all` the others too. A flag that would then be refused is not
suggested: a misspelt `--tensor-paralel-size` is answered with what to do instead.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from difflib import get_close_matches

import typer
from typer._click.core import Context, Parameter  # these have no public name that fits
from typer._click.exceptions import NoSuchOption
from typer._click.formatting import HelpFormatter
from typer.core import TyperCommand, TyperGroup, TyperOption

from headrace.cli.flags.flag import FURTHER
from headrace.cli.flags.vllm import TABLE, RefusedFlag

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
    """A group of commands that answers an unknown flag, its own or a command's, with the nearest known one."""

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
