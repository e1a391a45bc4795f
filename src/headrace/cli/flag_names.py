"""Maps values of the configuration to the flags that set them, so that errors name what the user wrote."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

from headrace.cli.values_of_flags import dashed

if TYPE_CHECKING:
    import typer
    from typer._click.core import Parameter


def flag_names(context: typer.Context, words: Sequence[str], paths: Mapping[str, tuple[str, ...]]) -> dict[str, str]:
    """Configuration path -> the flag as written in `words`, the argument's name, or the flag's variable, whichever set the path.

    paths  parameter of the command -> paths that it sets
    """
    names: dict[str, str] = {}
    for param in context.command.params:
        source = context.get_parameter_source(param.name or "")
        if source is None or source.name == "DEFAULT":
            continue
        name = str(param.envvar) if source.name == "ENVIRONMENT" else _name_in(words, param)
        names |= dict.fromkeys(paths.get(param.name or "", ()), name)
    return names


def _name_in(words: Sequence[str], param: Parameter) -> str:
    """The last spelling of a flag in `words`, since the last one counts. For an argument, its name in the help."""
    if param.param_type_name == "argument":
        return param.human_readable_name
    spellings = (*param.opts, *param.secondary_opts)
    written = [name for name in (dashed(word.partition("=")[0]) for word in words) if name in spellings]
    return written[-1] if written else spellings[0]
