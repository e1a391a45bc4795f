"""Suggests, in place of a misspelt flag, the nearest of the command's own flags and vLLM's.

A flag that would then be refused is not suggested: a misspelt `--tensor-paralel-size` is answered with what to do instead.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from difflib import get_close_matches

from typer._click.core import Context  # these two have no public name that fits
from typer._click.exceptions import NoSuchOption
from typer.core import TyperGroup

from headrace.cli.vllm_flags import TABLE, RefusedFlag


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
