"""Tests flags made from the engine's configuration: the same in every command, and numbers as vLLM writes them."""

from __future__ import annotations

import inspect
import json
import re
from collections.abc import Mapping
from dataclasses import fields
from typing import get_type_hints

import pytest
import typer
from typer.testing import CliRunner

from headrace.cli.exits import UsageRefused
from headrace.cli.flags.flag import GivenFlags, given_flags, whole_number, with_flags
from headrace.cli.flags.rows import ENGINE_FLAGS, ENGINE_PROCESS_FLAGS, SERVE_FLAGS, engine_flags
from headrace.core.option import options
from headrace.core.strict_decode import decode
from headrace.engine.config import EngineConfig

pytestmark = pytest.mark.pure

WITHOUT_A_FLAG = {"memory_bytes", "model", "lora_modules", "max_waiting"}

DRAFTING = {"method": "ngram", "num_speculative_tokens": 3}


def given_by(*arguments: str) -> Mapping[str, object]:
    """What a command is called with."""
    app = typer.Typer()
    seen: list[Mapping[str, object]] = []

    @app.command()
    @with_flags(*ENGINE_FLAGS)
    def command(*, flags: GivenFlags) -> None:
        seen.append(flags.values)

    done = CliRunner().invoke(app, list(arguments))
    assert done.exit_code == 0, done.output
    return seen[0]


def test_every_option_is_said_once_and_every_command_takes_it_from_there() -> None:
    assert [name for name, _ in options(EngineConfig)] == [item.name for item in fields(EngineConfig)]
    assert {flag.field for flag in ENGINE_FLAGS} == {item.name for item in fields(EngineConfig)} - WITHOUT_A_FLAG


@pytest.mark.parametrize("flag", ENGINE_FLAGS, ids=lambda flag: flag.field)
def test_each_flag_reaches_its_field(flag: object) -> None:
    (found,) = [each for each in ENGINE_FLAGS if each is flag]
    name = found.names[0].partition("/")[0]
    text = {bool: [], int: ["2"], float: ["0.5"], str: [(*found.option.one_of, "x")[0]]}[found.kind]
    text = [json.dumps(DRAFTING)] if found.about.get("metavar") == "JSON" else text
    config = decode(EngineConfig, {"model": "m", **given_by(name, *text)})
    hint = get_type_hints(EngineConfig)[found.field]
    assert list(given_by(name, *text)) == [found.field]
    assert isinstance(getattr(config, found.field), hint)


def test_a_section_is_given_in_json() -> None:
    assert given_by("--speculative-config", json.dumps(DRAFTING)) == {"speculative_config": DRAFTING}


@pytest.mark.parametrize(
    ("word", "what"),
    [
        ("ngram", "'ngram' is not JSON"),
        ("{'method': 'ngram'}", "is not JSON"),
        ("[" * 100_000, "is not JSON"),
        ('"ngram"', '"ngram" is not a JSON object'),
        ("[]", "[] is not a JSON object"),
        ("null", "null is not a JSON object"),
    ],
)
def test_a_section_that_is_no_object_is_refused(word: str, what: str) -> None:
    [flag] = engine_flags("speculative_config")
    with pytest.raises(UsageRefused, match=re.escape(what)) as caught:
        flag.values(word)
    assert str(caught.value).startswith("--speculative-config: ")


NAMED = {"name": "sql", "path": "/adapters/sql"}


@pytest.mark.parametrize(
    ("word", "notice"),
    [
        ("sql=/adapters/sql", ""),
        (json.dumps(NAMED), ""),
        (json.dumps({**NAMED, "base_model_name": "org/base"}), "headrace: base_model_name of sql has no effect"),
    ],
)
def test_adapters_are_given_in_both_forms(word: str, notice: str, capsys: pytest.CaptureFixture[str]) -> None:
    [of_serve] = [flag for flag in SERVE_FLAGS if "--lora-modules" in flag.names]
    [of_engine] = [flag for flag in ENGINE_PROCESS_FLAGS if "--lora-modules" in flag.names]
    assert of_serve.values([word, "b=x=y"]) == {"model.adapters": {"sql": "/adapters/sql", "b": "x=y"}}
    assert capsys.readouterr().err.startswith(notice)
    assert of_engine.values([word]) == {"engine.lora_modules": [NAMED]}


@pytest.mark.parametrize(
    ("words", "what"),
    [
        (["sql"], "'sql' is not NAME=FOLDER"),
        (["=x"], "'=x' is not NAME=FOLDER"),
        (["sql="], "'sql=' is not NAME=FOLDER"),
        (["{"], "'{' is not JSON"),
        (['{"name": "sql"}'], "base_model_name is the only other key"),
        (['{"name": "sql", "path": 1}'], "base_model_name is the only other key"),
        (['{"name": "sql", "path": "/x", "load_inplace": true}'], "base_model_name is the only other key"),
        (["sql=/x", '{"name": "sql", "path": "/y"}'], "'sql' is given twice"),
    ],
)
def test_a_word_that_names_no_adapter_is_refused(words: list[str], what: str) -> None:
    [flag] = [flag for flag in SERVE_FLAGS if "--lora-modules" in flag.names]
    with pytest.raises(UsageRefused, match=re.escape(f"--lora-modules: {what}") if what.startswith("'") else re.escape(what)):
        flag.values(words)


def test_what_is_not_given_is_not_there_and_off_is_given() -> None:
    assert given_by() == {}
    assert given_by("--no-enable-prefix-caching", "--no-async-scheduling") == {"enable_prefix_caching": False, "depth": 1}
    assert given_by("--async-scheduling", "--dtype", "half") == {"depth": 2, "dtype": "float16"}
    assert given_flags(ENGINE_FLAGS, {"async_scheduling": True, "port": 5}).values == {"depth": 2}


def test_a_command_may_take_some_of_them() -> None:
    @with_flags(*engine_flags("seed", "depth"))
    def some(*, flags: GivenFlags) -> None: ...

    @with_flags(*engine_flags(without={"seed"}))
    def others(*, flags: GivenFlags) -> None: ...

    assert list(inspect.signature(some).parameters) == ["async_scheduling", "seed"]
    assert "seed" not in inspect.signature(others).parameters
    assert len(inspect.signature(others).parameters) == len(ENGINE_FLAGS) - 1


@pytest.mark.parametrize(
    ("text", "value"),
    [
        ("4096", 4096),
        ("1k", 1000),
        ("1K", 1024),
        ("2m", 2_000_000),
        ("2M", 2 << 20),
        ("25.6k", 25_600),
        ("1g", 10**9),
        ("4G", 4 << 30),
        ("-1", -1),
    ],
)
def test_numbers_are_read_as_vllm_reads_them(text: str, value: int) -> None:
    assert whole_number(text) == value
    if value > 0:
        assert given_by("--kv-cache-bytes", text) == {"kv_cache_bytes": value}


@pytest.mark.parametrize("text", ["many", "1.5K", "1.5", "k", "", "1 k", "1kb", "0x10"])
def test_what_is_no_number_is_refused_with_what_is(text: str) -> None:
    with pytest.raises(typer.BadParameter, match=r"is not a whole number. 4096, 4k"):
        whole_number(text)
