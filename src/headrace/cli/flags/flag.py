"""Flags of commands that set keys of a configuration: each is declared once, for the parser, for errors and for docs/config.md.

    @with_flags(*SERVE_FLAGS)
    def serve(config: ConfigPath = None, *, flags: GivenFlags) -> None: ...

`serve` then has a parameter for each flag in the place of `flags`. `cli.flags.rows` has the flags.
"""

from __future__ import annotations

import inspect
import re
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import wraps
from pathlib import Path
from typing import Annotated, Any

import typer

from headrace.cli.exits import UsageRefused
from headrace.cli.flags.vllm import dashed
from headrace.core.option import Option

Command = Callable[..., None]
DECIMAL = {"k": 10**3, "m": 10**6, "g": 10**9, "t": 10**12}
BINARY = {"K": 2**10, "M": 2**20, "G": 2**30, "T": 2**40}
_ANNOTATED: Any = Annotated  # for a type that is known only at run time
_NUMBER = re.compile(r"(?P<sign>-?)(?P<whole>\d+)(?P<rest>\.\d+)?(?P<unit>[kmgtKMGT]?)")

ConfigPath = Annotated[Path | None, typer.Option("--config", help="YAML file; see docs/config.md.")]
ParentFd = Annotated[int | None, typer.Option("--parent-fd", hidden=True, help="Inherited end of the supervisor's leash.")]

FURTHER = ", further"
"""End of the headings that only `--help-all` shows."""


def whole_number(text: str | int) -> int:
    """In vLLM's notation: 4096, 4k (4,000), 4K (4,096), 1.5m (1,500,000). Raises typer.BadParameter."""
    if isinstance(text, int):
        return text
    parts = _NUMBER.fullmatch(text.strip())
    if parts is None or (parts["rest"] and parts["unit"] not in DECIMAL):
        raise typer.BadParameter(f"{text!r} is not a whole number. 4096, 4k (4000) and 4K (4096) are, and 1.5k but not 1.5K.")
    if not parts["unit"]:
        return int(text)
    unit = (DECIMAL | BINARY)[parts["unit"]]
    value = float(parts["whole"] + parts["rest"]) * unit if parts["rest"] else int(parts["whole"]) * unit
    return round(value) * (-1 if parts["sign"] else 1)


def number_or(words: Sequence[str]) -> Callable[[str | int], str | int]:
    def number_or_word(text: str | int) -> str | int:
        return text if text in words else whole_number(text)

    return number_or_word


@dataclass(frozen=True, slots=True, kw_only=True)
class CommandFlag:
    """A flag, or an argument, and the keys that it sets.

    paths  keys of the command's configuration; `model.` stands for the only model's section
    names  spellings; empty: an argument
    kind   type of the value
    split  given value -> the values of `paths`; None: the value is that of the only path
    about  more keywords for typer
    """

    paths: tuple[str, ...]
    option: Option
    names: tuple[str, ...] = ()
    kind: Any = str
    group: str = ""
    split: Callable[[Any], Sequence[object]] | None = None
    about: Mapping[str, Any] = field(default_factory=dict)

    @property
    def field(self) -> str:
        return self.paths[0].rpartition(".")[2]

    @property
    def parameter(self) -> str:
        return self.names[0].partition("/")[0].strip("-").replace("-", "_") if self.names else f"{self.about['metavar'].lower()}_argument"

    def below(self, prefix: str) -> CommandFlag:
        return replace(self, paths=tuple(f"{prefix}.{path}" for path in self.paths))

    def values(self, given: object) -> dict[str, object]:
        """Path -> value; empty where the flag was not given."""
        if given is None or given == [] or given == ():
            return {}
        return dict(zip(self.paths, (given,) if self.split is None else self.split(given), strict=True))

    def written(self, words: Sequence[str]) -> str:
        """The flag as errors name it: its last spelling among the words, since that one counts; else its variable."""
        if not self.names:
            return str(self.about["metavar"])
        spellings = [spelling for name in self.names for spelling in name.split("/")]
        given = [name for word in words if (name := dashed(word.partition("=")[0])) in spellings]
        return given[-1] if given else str(self.about.get("envvar", spellings[0]))

    def signature(self) -> inspect.Parameter:
        """None, its default, means "not given"."""
        heading = self.group if self.option.is_common else self.group + FURTHER
        about: dict[str, Any] = {"help": self._help(), **self.about}
        made = typer.Option(*self.names, rich_help_panel=heading, **about) if self.names else typer.Argument(**about)
        annotation = _ANNOTATED[self.kind | None, made]
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


@dataclass(frozen=True, slots=True)
class GivenFlags:
    """values: path -> value; names: path -> the flag as it was written"""

    values: Mapping[str, object] = field(default_factory=dict)
    names: Mapping[str, str] = field(default_factory=dict)


NO_FLAGS = GivenFlags()


def given_flags(flags: Sequence[CommandFlag], params: Mapping[str, object]) -> GivenFlags:
    """Raises UsageRefused for two flags that set one key."""
    values: dict[str, object] = {}
    names: dict[str, str] = {}
    for flag in flags:
        for path, value in flag.values(params.get(flag.parameter)).items():
            name = flag.written(sys.argv[1:])
            if path in values:
                raise UsageRefused(f"{names[path]} and {name}: give one of them")
            values[path], names[path] = value, name
    return GivenFlags(values, names)


def with_flags(*flags: CommandFlag) -> Callable[[Command], Command]:
    def decorate(command: Command) -> Command:
        plain = inspect.signature(command, eval_str=True)
        parameters: list[inspect.Parameter] = []
        for parameter in plain.parameters.values():
            parameters += [flag.signature() for flag in flags] if parameter.name == "flags" else [parameter]

        @wraps(command)
        def called(*arguments: object, **params: object) -> None:
            own = {flag.parameter: params.pop(flag.parameter, None) for flag in flags}
            command(*arguments, flags=given_flags(flags, own), **params)

        called.__signature__ = plain.replace(parameters=parameters)  # type: ignore[attr-defined]
        called.__annotations__ = {parameter.name: parameter.annotation for parameter in parameters}
        return called

    return decorate
