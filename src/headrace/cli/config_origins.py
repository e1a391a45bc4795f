"""Finds the origin of a configuration value (a flag, a variable or the file), so that an error names what the user wrote."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager

from headrace.cli.config_variables import variables
from headrace.cli.config_yaml import shown_path
from headrace.core.errors import ConfigError


@contextmanager
def named_by_origin(environment: Mapping[str, str], prefix: str, flag_names: Mapping[str, str]) -> Iterator[None]:
    """Make a ConfigError of the block name the flag or variable that set the value, unless the value is from the file.

    environment  of the process; variables with `prefix` are configuration
    flag_names   path as `cli.config.load` takes it -> the flag as written; only flags that were given
    """
    try:
        yield
    except ConfigError as error:
        if (name := origin_of(error.where, environment, prefix, flag_names)) is None:
            raise
        raise error.at(name) from error


def origin_of(where: str, environment: Mapping[str, str], prefix: str, flag_names: Mapping[str, str] | None = None) -> str | None:
    """The flag or variable that set the value at `where`; None: the file. Flags win over variables, later variables over earlier ones."""
    for path, name in (flag_names or {}).items():
        if rest_within(where, shown_path(flag_steps(path))) is not None:
            return name
    found = None
    for name, steps in variables(environment, prefix):
        if (rest := rest_within(where, shown_path(steps))) is not None:
            found = name + rest  # a variable may hold a whole section
    return found


def rest_within(where: str, path: str) -> str | None:
    """The part of `where` after `path`; None when `where` is not inside `path`."""
    rest = where.removeprefix(path)
    return rest if rest != where and rest[:1] in ("", ".", "[") else None


def flag_steps(path: str) -> list[str]:
    """The steps of a flag's path: ["models", "0", "name"] for "model.name", since a flag means the only model's section."""
    steps = path.split(".")
    return ["models", "0", *steps[1:]] if steps[0] == "model" else steps
