"""The flag that was probably meant: the nearest of those a command takes and vLLM's.

Nothing is suggested that is then refused: a misspelt `--tensor-paralel-size` is answered with what to do instead.
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
        for nearest in get_close_matches(error.option_name, [*known, *TABLE], n=1):
            entry = TABLE.get(nearest)
            error.message += f". {entry.words(nearest)}" if isinstance(entry, RefusedFlag) else f". Did you mean {nearest}?"
        error.possibilities = None  # the parser's own, of the flags the command takes
        raise
