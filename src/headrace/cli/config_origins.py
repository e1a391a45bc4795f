"""Where a value of the configuration came from, so that an error names what was written: a flag, a variable, else the path in the file."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager

from headrace.cli.config_decode import variables
from headrace.cli.config_yaml import shown_path
from headrace.core.errors import ConfigError


@contextmanager
def named_by_origin(environment: Mapping[str, str], prefix: str, flag_names: Mapping[str, str]) -> Iterator[None]:
    """A ConfigError about a value that was not in the file is raised under the name of what set it.

    environment  as given to the process; variables with `prefix` are configuration
    flag_names   path as `cli.config.load` takes it -> the flag as it was written; of the flags that were given
    """
    try:
        yield
    except ConfigError as error:
        if (name := origin_of(error.where, environment, prefix, flag_names)) is None:
            raise
        raise ConfigError(name, error.reason, error.remedy) from error


def origin_of(where: str, environment: Mapping[str, str], prefix: str, flag_names: Mapping[str, str] | None = None) -> str | None:
    """What set the value at `where`. Flags are applied last; of variables the later one of two that hold it."""
    for path, name in (flag_names or {}).items():
        if _rest(where, shown_path(flag_steps(path))) is not None:
            return name
    found = None
    for name, steps in variables(environment, prefix):
        if (rest := _rest(where, shown_path(steps))) is not None:
            found = name + rest  # a variable may hold a whole section
    return found


def _rest(where: str, path: str) -> str | None:
    """What follows `path` in `where`; None when `where` is not inside it."""
    rest = where.removeprefix(path)
    return rest if rest != where and rest[:1] in ("", ".", "[") else None


def flag_steps(path: str) -> list[str]:
    """The steps of a flag's path: ["models", "0", "name"] for "model.name", since a flag means the only model's section."""
    steps = path.split(".")
    return ["models", "0", *steps[1:]] if steps[0] == "model" else steps
