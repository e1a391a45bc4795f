"""Refuses a flag that was given in the place of another flag's value: the parser takes any word for a value.

`serve --api-key --enable-prefix-caching` would serve with the key "--enable-prefix-caching". How words are parsed is typer's part.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from itertools import pairwise
from typing import TYPE_CHECKING

from headrace.cli.exits import UsageRefused

if TYPE_CHECKING:
    from typer._click.core import Command

_FLAG = re.compile(r"--?[a-zA-Z]|--$")


def is_flag(word: str) -> bool:
    """Whether a word is a flag, and so cannot be the value of the flag before it. "-1" is a value."""
    return _FLAG.match(word) is not None


def dashed(name: str) -> str:
    """A flag with dashes, since vLLM also accepts underscores."""
    return name.replace("_", "-") if name.startswith("--") else name


def refuse_missing_values(command: Command, words: Sequence[str]) -> None:
    """Check the words of a command line for `command` and its sub-commands. Raises UsageRefused for a flag without its value."""
    for word, following in pairwise([*words, "--"]):
        if word == "--":
            return
        if word in (commands := getattr(command, "commands", {})):
            command = commands[word]
        elif dashed(word) in _flags_with_value(command) and is_flag(following):
            remedy = "" if following == "--" else f" If {following} is the value, write {dashed(word)}={following}."
            raise UsageRefused(f"{dashed(word)}: a value is missing.{remedy}")


def _flags_with_value(command: Command) -> set[str]:
    options = [param for param in command.params if param.param_type_name == "option" and not getattr(param, "is_flag", False)]
    return {name for option in options for name in option.opts}
