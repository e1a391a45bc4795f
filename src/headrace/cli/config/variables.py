"""Sets the values of environment variables and flags in the plain data of a configuration, and names the one that set a wrong value.

A variable's value is a string where the configuration has a string, and YAML elsewhere.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import is_dataclass
from difflib import get_close_matches
from typing import get_args, get_origin, get_type_hints

from headrace.cli.config.yaml_files import Raw, parse_yaml, shown_path
from headrace.core.errors import ConfigError
from headrace.core.strict_decode import UnknownKey, generic, inner, key_of

TOP_LEVEL = (
    "state",
    "drain_timeout_s",
    "start_timeout_s",
    "hang_timeout_s",
    "run_dir",
    "allow_open",
    "site_key",
    "log_format",
    "experimental",
)
"""Keys outside sections; their variables have no double underscore (HEADRACE_DRAIN_TIMEOUT_S)."""

ELSEWHERE = {
    "gateway.models": "Declare models at the top level.",
    "gateway.salt_key": "Set site_key at the top level.",
    "gateway.state": "Set state at the top level.",
    "gateway.tiers": "Declare tiers at the top level.",
    "gateway.prices": "Declare prices at the top level.",
    "gateway.usage": "Set usage at the top level.",
    "gateway.timeouts.drain_s": "Set drain_timeout_s at the top level.",
    "gateway.limits.max_text_workers": "Each gateway worker has one or two: set gateway.workers.",
    "gateway.limits.max_prompt_bytes": "A sixteenth of the memory is for prompts: limit the process's memory, or set max_requests.",
    "gateway.limits.max_answer_bytes": "Answers may hold 40 MiB: set max_requests, or max_tenant_share.",
}
"""Keys of the packages' configs that are computed from other keys, or have one good value -> what to do instead. A file that has one is
refused, and none is suggested."""

REMOVED = {
    "models[N].upstreams[N].first_token_s": "silence_s holds before the first token too.",
    "models[N].upstreams[N].allow_link_local": "A server at a link-local address is never connected to: name it by another address.",
    "gateway.timeouts.sse_ping_s": "A quiet stream gets a comment line every 10 s: give proxies a longer time.",
    "gateway.idempotency": "Answers to requests with an Idempotency-Key are kept for 24 hours.",
}
"""Paths of keys that earlier versions had -> what takes their place."""


def apply_environment(kind: type, raw: Raw, environment: Mapping[str, str], prefix: str) -> None:
    """Set each variable `PREFIX_SECTION__KEY=value` in `raw`, in place. List indices are numbers. Raises ConfigError for an unknown path.

    A variable without `__` after the prefix is configuration only if TOP_LEVEL has it.
    """
    for name, steps in variables(environment, prefix):
        apply_variable(kind, raw, name, steps, environment[name], prefix)


def apply_variable(kind: type, raw: Raw, name: str, steps: Sequence[str], text: str, prefix: str) -> None:
    hint = _hint_at(kind, steps, name, prefix)
    set_at(raw, steps, text if inner(hint) is str else parse_yaml(text, name), name)


def variables(environment: Mapping[str, str], prefix: str) -> Iterator[tuple[str, list[str]]]:
    """(name, steps of its path) of each variable that is configuration, in the order in which they are applied."""
    for name in sorted(environment):
        rest = name.removeprefix(prefix).lower()
        if name.startswith(prefix) and ("__" in rest or rest in TOP_LEVEL):
            yield name, rest.split("__")


def known_variables(kind: object, prefix: str, number: str = "0") -> Iterator[str]:
    """Names of variables for every value that can be set, except below names chosen in the file (tiers, prices).

    number  stands for list indices
    """
    hint = inner(kind)
    if get_origin(hint) is tuple and is_dataclass(get_args(hint)[0]):
        yield from known_variables(get_args(hint)[0], f"{prefix}{number}__", number)
    elif isinstance(hint, type) and is_dataclass(hint):
        for name, each in get_type_hints(hint).items():
            yield from known_variables(each, f"{prefix}{name.upper()}__", number)
    elif get_origin(hint) is not dict:
        yield prefix.removesuffix("__")


def nearest_variable(kind: type, name: str, prefix: str) -> str | None:
    """The known variable that was probably meant: the only one with the same ending, else the one with the most similar name."""
    elsewhere = {prefix + path.upper().replace(".", "__") for path in ELSEWHERE}
    number = next((step for step in name.split("__") if step.isdecimal()), "0")
    known = [each for each in known_variables(kind, prefix, number) if each not in elsewhere]
    last = name.removeprefix(prefix).rpartition("__")[2]
    alike = [each for each in known if each.endswith(f"__{last}")]
    return alike[0] if len(alike) == 1 else next(iter(get_close_matches(name, known, n=1, cutoff=0.7)), None)


def _hint_at(kind: type, steps: Sequence[str], name: str, prefix: str) -> object:
    hint: object = kind
    for step in steps:
        hint = inner(hint)
        if get_origin(hint) is tuple and step.isdecimal():
            hint = get_args(hint)[0]
        elif get_origin(hint) is dict:
            hint = get_args(hint)[1]
        elif isinstance(hint, type) and is_dataclass(hint):
            hints = {key_of(name): each for name, each in get_type_hints(hint).items()}
            if step not in hints:
                if (remedy := REMOVED.get(generic(shown_path(steps)))) is not None:
                    raise ConfigError(name, "is not a key any more", remedy)
                nearest = nearest_variable(kind, name, prefix)
                raise ConfigError(name, "is not a known key", f"Did you mean {nearest}?") if nearest else UnknownKey(name, hints, {})
            hint = hints[step]
        else:
            raise ConfigError(name, f"nothing can be set at {step!r}", "Levels are joined by two underscores; list places are numbers.")
    return hint


def set_at(raw: Raw, steps: Sequence[str], value: object, name: str) -> None:
    """Set one value deep in `raw`, in place. Missing or null mappings are made, and the next item of a list.

    Nothing is set in a value of the wrong type (gateway: []): decoding refuses that value by its own path. Raises ConfigError for an index
    beyond the next item.
    """
    place: object = raw
    for index, step in enumerate(steps):
        last = index == len(steps) - 1
        fresh: object = value if last else ([] if steps[index + 1].isdecimal() else {})
        if isinstance(place, dict):
            if last or place.get(step) is None:
                place[step] = fresh
            place = place[step]
        elif not (isinstance(place, list) and step.isdecimal()):
            return
        elif int(step) <= len(place):
            if int(step) == len(place):
                place.append(fresh)
            elif last:
                place[int(step)] = value
            place = place[int(step)]
        else:
            raise ConfigError(name, f"nothing can be set at {step!r}", "List places are filled in order, from 0.")


@contextmanager
def named_by_origin(environment: Mapping[str, str], prefix: str, flag_names: Mapping[str, str]) -> Iterator[None]:
    """Make a ConfigError of the block name the flag or variable that set the value, unless the value is from the file."""
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
    rest = where.removeprefix(path)
    return rest if rest != where and rest[:1] in ("", ".", "[") else None


def flag_steps(path: str) -> list[str]:
    """The steps of a flag's path: ["models", "0", "name"] for "model.name", since a flag means the only model's section."""
    steps = path.split(".")
    return ["models", "0", *steps[1:]] if steps[0] == "model" else steps
