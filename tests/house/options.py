"""Lists every option: keys of the configuration file with type and default, and flags of every command.

`python -m tests.house.options > tests/house/options.txt` freezes the list; test_options.py holds the code against it, so that a new
option is always a decision somebody made and wrote down.
"""

from __future__ import annotations

from collections.abc import Iterator

import typer.main

from headrace.cli.config.load import file_keys
from headrace.cli.main import app


def config_options() -> Iterator[tuple[str, str]]:
    """(path, "type = default, when a change holds, whose it is") of every key that a file can have, in the order of the classes."""
    for leaf in file_keys():
        shown = leaf.hint.__name__ if isinstance(leaf.hint, type) else str(leaf.hint)
        default = "(required)" if leaf.is_required else repr(leaf.option.default)
        if on := leaf.option.on:
            default = " or ".join(f"{value!r} on {device}" for device, value in on.items())
        yield leaf.path, f"{shown} = {default}, {leaf.option.reload}, {leaf.option.role}"


def flags() -> Iterator[tuple[str, str]]:
    """(command, its flags) of every command, hidden ones included."""

    def walk(command: object, name: str) -> Iterator[tuple[str, str]]:
        params = getattr(command, "params", [])
        words = [word for param in params for word in (*param.opts, *param.secondary_opts) if word.startswith("-")]
        yield name, " ".join(sorted(words))
        for child, inner_command in sorted(getattr(command, "commands", {}).items()):
            yield from walk(inner_command, f"{name} {child}")

    yield from walk(typer.main.get_command(app), "headrace")


def listing() -> str:
    lines = [f"{path}: {rest}" for path, rest in config_options()]
    lines += [f"{command}: {words}" for command, words in flags()]
    return "\n".join(lines) + "\n"


if __name__ == "__main__":
    print(listing(), end="")
