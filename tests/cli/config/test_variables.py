"""Tests that the remedy a message suggests works: it is accepted, and not refused by the next message."""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from typer._click.exceptions import NoSuchOption
from typer.main import get_command

from headrace.cli.config.load import INSTEAD, apply_variable, from_raw, known_variables, nearest_variable, set_at, variables
from headrace.cli.flags.vllm import TABLE, RefusedFlag
from headrace.cli.main import app
from headrace.core.errors import ConfigError
from headrace.core.option import options
from headrace.engine.config import EngineConfig
from tests.house.options import config_options

pytestmark = pytest.mark.pure

PATHS = [path for path, _ in config_options()]


def misspelt(word: str) -> list[str]:
    """A letter left out, one too many, two changed places."""
    made = [word[:-1], word + "x", word[0] + word[2] + word[1] + word[3:]] if len(word) > 4 else [word + "x"]
    return [each for each in made if each != word]


def steps_of(path: str) -> list[str]:
    return path.replace("[N]", ".0").replace("[NAME]", ".free").split(".")


@pytest.mark.parametrize("path", [*PATHS, *INSTEAD])
def test_keys_that_are_suggested_are_known(path: str) -> None:
    *section, last = steps_of(path)
    for word in misspelt(last):
        raw: dict[str, object] = {}
        set_at(raw, [*section, word], 1, "test")
        with pytest.raises(ConfigError) as caught:
            from_raw(raw, "headrace-tiny")
        if f"{'.'.join(section)}.{word}" in INSTEAD or word in [steps_of(known)[-1] for known in PATHS]:
            continue  # another key by chance
        assert caught.value.reason == "is not a known key", word
        remedy = caught.value.remedy
        suggested = re.fullmatch(r"Did you mean (\w+)\?", remedy)
        listed = re.fullmatch(r"Known: (.*)\.", remedy)
        names = [suggested[1]] if suggested else listed[1].split(", ") if listed else []
        assert names or remedy in INSTEAD.values()
        for name in names:
            known = ".".join([*section, name])
            assert any(".".join(steps_of(each)).startswith(known) for each in PATHS), f"{word} -> {known}"


@pytest.mark.parametrize(("number", "name"), list(enumerate(known_variables())))
def test_variables_that_are_suggested_are_read(number: int, name: str) -> None:
    """One misspelling of each, another in turn: in names this long, one letter is as near as the next."""
    made = misspelt(name)
    suggested = nearest_variable(made[number % len(made)])
    assert suggested is not None
    ((found, steps),) = variables({suggested: "1"})
    raw: dict[str, object] = {}
    apply_variable(raw, found, steps, "1")
    assert raw
    assert ".".join(steps) not in INSTEAD


def commands(command: Any, words: tuple[str, ...] = ()) -> Iterator[tuple[tuple[str, ...], Any]]:
    yield words, command
    for name, inner in getattr(command, "commands", {}).items():
        yield from commands(inner, (*words, name))


MAIN = get_command(app)


@pytest.mark.parametrize(("words", "command"), list(commands(MAIN)), ids=lambda each: " ".join(each) if isinstance(each, tuple) else "")
def test_flags_that_are_suggested_are_taken(words: tuple[str, ...], command: Any) -> None:
    """All misspellings of the command's own flags; of vLLM's flags, which `serve` takes, one elsewhere: another for each flag in turn."""
    taken = {name for param in command.params for name in (*param.opts, *param.secondary_opts)}
    flags = {name: misspelt(name[2:]) for name in sorted(taken | set(TABLE)) if name.startswith("--")}
    for number, (flag, made) in enumerate(flags.items()):
        for word in (f"--{each}" for each in (made if flag in taken or words == ("serve",) else [made[number % len(made)]])):
            if word in taken or word in TABLE:
                continue
            with pytest.raises(NoSuchOption) as caught:
                MAIN.main([*words, word], prog_name="headrace", standalone_mode=False)
            message = caught.value.message
            for suggested in re.findall(r"Did you mean (\S+)\?", message):
                entry = TABLE.get(suggested)
                assert suggested in taken or (entry is not None and not isinstance(entry, RefusedFlag)), message
            if "not supported" in message:
                assert any(entry.remedy in message for entry in TABLE.values() if isinstance(entry, RefusedFlag)), message


@pytest.mark.parametrize("name", [name for name, option in options(EngineConfig) if option.one_of])
def test_values_that_are_suggested_are_accepted(name: str, model_folder: Path) -> None:
    with pytest.raises(ConfigError) as caught:
        EngineConfig(model="m", **{name: "xyzzy"}).checked()  # type: ignore[arg-type]
    for value in caught.value.reason.partition(" is not one of ")[2].split(", "):
        raw: dict[str, object] = {"models": [{"engine": {"model": str(model_folder), name: value}}]}
        from_raw(raw)
