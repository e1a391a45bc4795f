"""Flags of other servers are refused by name, never swallowed; values that change nothing pass."""

from __future__ import annotations

import pytest

from headrace.cli.exits import ExitCode, UsageRefused, exit_code_of
from headrace.cli.refused import REFUSED, without_refused


@pytest.mark.parametrize(
    "arguments",
    [
        ["serve", "m", "--tensor-parallel-size", "1"],
        ["serve", "m", "--tensor-parallel-size=1"],
        ["serve", "-tp", "1", "m"],
        ["serve", "m", "--tokenizer-mode", "auto", "--enforce-eager"],
    ],
)
def test_values_that_change_nothing_are_dropped(arguments: list[str]) -> None:
    assert without_refused(arguments) == ["serve", "m"]


@pytest.mark.parametrize(
    "arguments",
    [
        ["--tensor-parallel-size", "2"],
        ["--tensor-parallel-size=2"],
        ["--tensor-parallel-size"],
        ["-tp", "2"],
        ["--calculate-kv-scales"],
        ["--enable-lora"],
        ["--lora-modules", "a=b"],
        ["--tool-call-parser", "hermes"],
        ["--speculative-config", "{}"],
        ["--trust-remote-code"],
    ],
)
def test_unsupported_flags_are_refused_by_name_with_a_remedy(arguments: list[str]) -> None:
    with pytest.raises(UsageRefused) as caught:
        without_refused(["serve", *arguments])
    name = arguments[0].partition("=")[0]
    assert str(caught.value).startswith(name)
    assert REFUSED[name].remedy in str(caught.value)
    assert exit_code_of(caught.value) is ExitCode.USAGE


def test_every_refusal_says_what_to_do() -> None:
    for name, refused in REFUSED.items():
        assert refused.remedy or refused.accepted is None, name


def test_other_words_are_left_to_the_parser() -> None:
    arguments = ["serve", "m", "--port", "1", "--max-modl-len", "5"]
    assert without_refused(arguments) == arguments
    assert without_refused(["chat", "--", "--enable-lora"]) == ["chat", "--", "--enable-lora"]


def test_no_flag_of_serve_is_refused() -> None:
    from typer.main import get_command

    from headrace.cli.main import app

    command = get_command(app)
    serve = command.get_command(None, "serve")  # type: ignore[attr-defined]
    taken = {flag for parameter in serve.params for flag in (*parameter.opts, *parameter.secondary_opts)}
    assert "--kv-cache-dtype" in taken
    assert not taken & set(REFUSED)
