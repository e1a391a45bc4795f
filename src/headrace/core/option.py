"""Options: fields of the configurations with what people and commands must know of them, each said once.

    port: int = option(8000, "Port to listen at; 0 takes a free one.", low=0, high=65535)

The tables of docs/config.md, the commands' flags, the keywords of `LLM`, the checks of values and the paths that a reload may change are
made from these fields. A field that is itself a configuration (`section`) hands on to its fields what holds for all of them.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Mapping
from dataclasses import MISSING, dataclass, field, fields, is_dataclass, replace
from enum import StrEnum
from functools import cache
from math import isfinite
from typing import Any, TypeVar, cast, get_args, get_origin, get_type_hints

from headrace.core.errors import ConfigError
from headrace.core.strict_decode import inner, joined, key_of

Value = TypeVar("Value")

_LINK = re.compile(r"\[([^\]]*)\]\([^)]*\)")


class Reload(StrEnum):
    LIVE = "live"
    RESTART = "restart"


class Role(StrEnum):
    DEVELOPER = "developer"
    """chooses a model and makes it fit its machine"""
    OPERATOR = "operator"
    """runs the deployment: its machines, network, processes and times"""
    SECURITY = "security"
    """decides which clients may connect, and what each is shown"""
    TENANTS = "tenants"
    """owns tenants: quotas, fairness, prices"""
    BILLING = "billing"
    """keeps and ships usage records"""


@dataclass(frozen=True, slots=True, kw_only=True)
class Option:
    """help         one sentence or a few words, in Markdown
    default      value of a field that is not set; None where `on` has it
    shown        the default in words, where its value says too little ("the model's"); empty: the value is shown
    flags        of a class with a flag for each field (`cli.flags.rows`); None: made from the field's name
    one_of       allowed values; other_names: vLLM's names for some of them
    words        may stand in place of a number
    low, high    bounds, included; above: in place of `low`, a bound that is not included
    switch       (off, on): the values that its flag --x/--no-x sets
    on           default by device; empty: one default for all devices
    reload, role  None: as in the section that the field is in
    is_shared    the number counts over all requests of a site, and each gateway worker gets its part
    is_common    `--help` shows its flag; `--help-all` shows the others too
    """

    help: str
    default: object = None
    shown: str = ""
    flags: tuple[str, ...] | None = None
    one_of: tuple[str, ...] = ()
    other_names: Mapping[str, str] = field(default_factory=dict)
    words: tuple[str, ...] = ()
    low: float | None = None
    high: float | None = None
    above: float | None = None
    switch: tuple[int, int] | None = None
    on: Mapping[str, object] = field(default_factory=dict)
    reload: Reload | None = None
    role: Role | None = None
    is_required: bool = False
    is_shared: bool = False
    is_common: bool = False

    @property
    def shown_default(self) -> str:
        """In Python's notation: `64, on a GPU 256` where it depends on the device."""
        return f"{self.on['cpu']!r}, on a GPU {self.on['cuda']!r}" if self.on else repr(self.default)

    @property
    def plain_help(self) -> str:
        return _LINK.sub(r"\1", self.help).replace("`", "")

    def check(self, name: str, value: object, kind: object) -> None:
        """Raises ConfigError if `value` is not in `one_of`, no number of the field's type, infinite, or outside the bounds.

        kind: type of the field, without None. A value of None has no bounds.
        """
        if self.one_of and value not in self.one_of:
            raise ConfigError(name, f"{value!r} is not one of {', '.join(self.one_of)}")
        if value in self.words:
            return
        kind = int if self.words else kind
        if value is None or kind not in (int, float):
            return
        if type(value) is not int and (kind is int or type(value) is not float):
            words = "".join(f", nor {word}" for word in self.words)
            raise ConfigError(name, f"{value!r} is not a {'number' if kind is float else 'whole number'}{words}")
        number, low = cast(float, value), self.above if self.low is None else self.low
        is_high_enough = low is None or (number > low if self.low is None else number >= low)
        if low is not None and self.high is not None and not (is_high_enough and number <= self.high):
            raise ConfigError(name, f"{value} is outside {written(low)}..{written(self.high)}", self._without)
        if not isfinite(number):
            raise ConfigError(name, f"{value} is not a finite number", self._without)
        if not is_high_enough:
            raise ConfigError(name, f"{value} {self._too_low}", self._without)

    @property
    def _without(self) -> str:
        return f"Leave it out for {self.shown or 'no limit'}." if self.default is None and not self.on and not self.is_required else ""

    @property
    def _too_low(self) -> str:
        if self.above == 0 or self.low == 1:
            return "is not positive"
        return "is negative" if self.low == 0 else f"is less than {written(self.low or 0)}"


def written(number: float) -> str:
    """As people write a bound: 1000000, 0.5, 1e-09."""
    return str(int(number)) if number == int(number) else f"{number:g}"


def option(default: Value, help: str, *flags: str, repr: bool = True, **about: object) -> Value:
    """repr: False for a secret."""
    if flags:
        about["flags"] = flags
    return field(default=default, repr=repr, metadata={"option": Option(help=help, default=default, **about)})  # type: ignore[arg-type]


def required(help: str, **about: object) -> Any:
    return field(metadata={"option": Option(help=help, is_required=True, **about)})  # type: ignore[arg-type]


def by_device(cpu: Value, gpu: Value, help: str, *flags: str, **about: object) -> Value:
    """The field is None until its class fills in the default of the device."""
    return option(cast(Value, None), help, *flags, on={"cpu": cpu, "cuda": gpu}, **about)  # type: ignore[arg-type]


def section(make: Callable[[], Value], *, reload: Reload | None = None, role: Role | None = None) -> Value:
    """A field that is a nested configuration. reload, role: for its fields that set none."""
    made: Value = field(default_factory=make, metadata={"option": Option(help="", reload=reload, role=role)})
    return made


def mapping(help: str, **about: object) -> dict[str, str]:
    """A field of plain values by names that are chosen in the file; empty by default."""
    made: dict[str, str] = field(default_factory=dict, metadata={"option": Option(help=help, default={}, **about)})  # type: ignore[arg-type]
    return made


def options(kind: type) -> Iterator[tuple[str, Option]]:
    for item in fields(kind):
        if "option" in item.metadata:
            yield item.name, item.metadata["option"]


@cache
def _hints(kind: type) -> dict[str, Any]:
    """Evaluated once, since a configuration is checked at each reload."""
    return get_type_hints(kind)


def check_options(value: object, where: str = "") -> None:
    """Raises ConfigError for the first field of `value` that its `Option` does not allow. where: path of `value`."""
    kind: type = type(value)
    hints = _hints(kind)
    for name, described in options(kind):
        described.check(joined(where, key_of(name)), getattr(value, name), inner(hints[name]))


@dataclass(frozen=True, slots=True)
class Leaf:
    """A key of a configuration file that holds a plain value.

    path    with [N] for a list index and [NAME] for a name chosen in the file
    option  with `reload` and `role` filled in from the sections around it; an `Option` without help if the field has none
    """

    path: str
    hint: object
    is_required: bool
    option: Option


def leaves(kind: type, where: str = "", reload: Reload = Reload.RESTART, role: Role | None = None) -> Iterator[Leaf]:
    """Every key of a file that is decoded as `kind`, in the order of the fields. reload, role: of the section around it."""
    hints = _hints(kind)
    for item in fields(kind):
        path, hint = joined(where, key_of(item.name)), inner(hints[item.name])
        described: Option = item.metadata.get("option", Option(help=""))
        handed_on = described.reload or reload, described.role or role
        if is_dataclass(nested := _of_items(hint)) and isinstance(nested, type):
            yield from leaves(nested, path + _PLACES.get(get_origin(hint), ""), *handed_on)
        else:
            is_required = item.default is MISSING and item.default_factory is MISSING
            yield Leaf(path, hints[item.name], is_required, replace(described, reload=handed_on[0], role=handed_on[1]))


_PLACES: Mapping[object, str] = {tuple: "[N]", dict: "[NAME]"}


def _of_items(hint: object) -> object:
    return get_args(hint)[-1 if get_origin(hint) is dict else 0] if get_origin(hint) in _PLACES else hint


def live_paths(kind: type, where: str = "") -> Iterator[str]:
    """Each path, with everything below it, may change while the process runs."""
    for name, described in options(kind):
        path = joined(where, name)
        nested = inner(get_type_hints(kind)[name])
        if described.reload is Reload.LIVE:
            yield path
        elif isinstance(nested, type) and is_dataclass(nested):
            yield from live_paths(nested, path)
