"""The flag somebody probably meant: the nearest of those a command takes and those it refuses by name.

A misspelt `--tensor-paralel-size` leads to `--tensor-parallel-size`, whose refusal says what to do instead.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from difflib import get_close_matches

from typer._click.core import Context  # these two have no public name that fits
from typer._click.exceptions import NoSuchOption
from typer.core import TyperGroup

from headrace.cli.refused import REFUSED


class SuggestingGroup(TyperGroup):
    """A group in which every unknown flag, its commands' included, is answered with the nearest known name."""

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
        if nearest := get_close_matches(error.option_name, [*known, *REFUSED], n=1):
            error.message += f". Did you mean {nearest[0]}?"
        error.possibilities = None  # the parser's own, of the flags the command takes
        raise
