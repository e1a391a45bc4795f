"""Makes the flags for the engine's options from `EngineConfig`, so that every command has the same flags with the same help.

    @with_engine_flags()
    def serve(port: ..., engine: Given) -> None: ...

`serve` then has a parameter for each option in the place of `engine`. When it is called, `engine` holds the options that were given.
"""

from __future__ import annotations

import inspect
import re
from collections.abc import Callable, Collection, Iterator, Mapping
from dataclasses import dataclass
from functools import wraps
from typing import Annotated, Any, get_type_hints

import typer

from headrace.core.option import Option, options
from headrace.engine.config import EngineConfig

Given = Mapping[str, object]
"""Field of EngineConfig -> its value; holds the given options only."""

Command = Callable[..., None]
DECIMAL = {"k": 10**3, "m": 10**6, "g": 10**9, "t": 10**12}
BINARY = {"K": 2**10, "M": 2**20, "G": 2**30, "T": 2**40}
_ANNOTATED: Any = Annotated  # for a type that is known only at run time
_NUMBER = re.compile(r"(?P<sign>-?)(?P<whole>\d+)(?P<rest>\.\d+)?(?P<unit>[kmgtKMGT]?)")


def whole_number(text: str | int) -> int:
    """A whole number in vLLM's notation: 4096, 4k (4,000), 4K (4,096), 1.5m (1,500,000). Raises typer.BadParameter."""
    if isinstance(text, int):
        return text
    found = _NUMBER.fullmatch(text.strip())
    if found is None or (found["rest"] and found["unit"] not in DECIMAL):
        raise typer.BadParameter(f"{text!r} is not a whole number. 4096, 4k (4000) and 4K (4096) are, and 1.5k but not 1.5K.")
    if not found["unit"]:
        return int(text)
    unit = (DECIMAL | BINARY)[found["unit"]]
    value = float(found["whole"] + found["rest"]) * unit if found["rest"] else int(found["whole"]) * unit
    return round(value) * (-1 if found["sign"] else 1)


@dataclass(frozen=True, slots=True)
class EngineFlag:
    """One flag of an engine option. field: of EngineConfig; names: spellings; kind: type of the value"""

    field: str
    names: tuple[str, ...]
    kind: type
    option: Option

    @property
    def parameter(self) -> str:
        """The name of the command's parameter: the first spelling as a Python identifier."""
        return self.names[0].partition("/")[0].strip("-").replace("-", "_")

    def value(self, given: object) -> object:
        """The value for EngineConfig. given: the value as parsed by typer"""
        if self.option.switch is not None and isinstance(given, bool):
            return self.option.switch[given]
        return self.option.other_names.get(given, given) if isinstance(given, str) else given

    def signature(self) -> inspect.Parameter:
        """The parameter for typer's signature. Its default, None, means "not given"."""
        about: dict[str, Any] = {"help": self._help()}
        if self.kind is int:
            about |= {"parser": whole_number, "metavar": "<int>"}
        annotation = _ANNOTATED[self.kind | None, typer.Option(*self.names, **about)]
        return inspect.Parameter(self.parameter, inspect.Parameter.KEYWORD_ONLY, default=None, annotation=annotation)

    def _help(self) -> str:
        *first, last = self.option.one_of or ("",)
        choices = f"{', '.join(first)} or {last}. " if first else ""
        shown = (self.option.shown or self.option.shown_default).strip("'").replace("`", "")
        if self.option.switch is not None:
            shown = shown.replace(str(self.option.switch[1]), "on").replace(str(self.option.switch[0]), "off")
        shown = {"True": "on", "False": "off"}.get(shown, shown)
        text = self.option.plain_help.rstrip(".")
        return f"{choices}{text}." + ("" if shown == "None" else f" Default {shown}.")


def _flags() -> Iterator[EngineFlag]:
    hints = get_type_hints(EngineConfig)
    for name, option in options(EngineConfig):
        kind = bool if option.switch else next(kind for kind in (bool, int, float, str) if hints[name] in (kind, kind | None))
        word = name.replace("_", "-")
        made = f"--{word}/--no-{word}" if kind is bool else f"--{word}"
        names = (made,) if option.flags is None else option.flags
        if names and name != "model":  # an argument as well, which each command declares
            yield EngineFlag(name, names, kind, option)


ENGINE_FLAGS = tuple(_flags())


def engine_values(params: Mapping[str, object]) -> dict[str, object]:
    """The given engine options among a command's parameters, by field of EngineConfig."""
    given = [(flag, params.get(flag.parameter)) for flag in ENGINE_FLAGS]
    return {flag.field: flag.value(value) for flag, value in given if value is not None}


def with_engine_flags(*fields: str, without: Collection[str] = ()) -> Callable[[Command], Command]:
    """Replace a command's parameter `engine` by a flag for each of `fields`; without `fields`, by one for every field not in `without`."""
    taken = [flag for flag in ENGINE_FLAGS if (flag.field in fields if fields else flag.field not in without)]

    def decorate(command: Command) -> Command:
        plain = inspect.signature(command, eval_str=True)
        parameters: list[inspect.Parameter] = []
        for parameter in plain.parameters.values():
            parameters += [flag.signature() for flag in taken] if parameter.name == "engine" else [parameter]

        @wraps(command)
        def called(*arguments: object, **params: object) -> None:
            engine = engine_values({flag.parameter: params.pop(flag.parameter, None) for flag in taken})
            command(*arguments, engine=engine, **params)

        called.__signature__ = plain.replace(parameters=parameters)  # type: ignore[attr-defined]
        called.__annotations__ = {parameter.name: parameter.annotation for parameter in parameters}
        return called

    return decorate
