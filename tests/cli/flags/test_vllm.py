"""Tests vLLM's flags: each is done, dropped with a notice, or refused by name with a remedy; none is swallowed. Each row of the table is
tested.
"""

from __future__ import annotations

import re
from typing import TYPE_CHECKING

import pytest
from typer.main import get_command

from headrace.cli.exits import CommandExitCode, UsageRefused, exit_code_of
from headrace.cli.flags.vllm import SEVERAL, TABLE, IgnoredFlag, RefusedFlag, TranslatedFlag, translated
from headrace.cli.main import app
from tests.house.reader import ROOT

pytestmark = pytest.mark.pure

if TYPE_CHECKING:
    from typer._click.core import Context

MAIN = get_command(app)
SERVE = MAIN.get_command(None, "serve")  # type: ignore[attr-defined]
TAKEN = {flag for parameter in SERVE.params for flag in (*parameter.opts, *parameter.secondary_opts)}
NUMBER = "2"


def underscored(flag: str) -> str:
    return f"--{flag[2:].replace('-', '_')}" if flag.startswith("--") else flag


def parsed(*arguments: str) -> Context:
    """As `headrace serve` would be called: translated, and read by its parser."""
    kept, _ = translated(["serve", *arguments])
    context: Context = SERVE.make_context("serve", kept[1:], parent=MAIN.make_context("headrace", list(kept)))
    return context


@pytest.mark.parametrize("name", [name for name, entry in TABLE.items() if isinstance(entry, TranslatedFlag)])
def test_what_means_the_same_is_put_as_ours_and_taken_by_the_parser(name: str) -> None:
    entry = TABLE[name]
    assert isinstance(entry, TranslatedFlag)
    assert entry.ours[0] in TAKEN
    value = [NUMBER] if entry.takes_value else []
    for words in ([name, *value], [f"{name}={NUMBER}"] if value else [name]):
        kept, notices = translated(["serve", "m", *words])
        assert (kept, notices) == (["serve", "m", *entry.ours, *value], [])
        params = parsed("m", *words).params
        ours = entry.ours[0].strip("-").replace("-", "_")
        assert str(params[ours]) == [*entry.ours[1:], *value][0]


@pytest.mark.parametrize("name", [name for name, entry in TABLE.items() if isinstance(entry, IgnoredFlag)])
def test_what_has_no_effect_is_dropped_and_said_in_one_line(name: str) -> None:
    entry = TABLE[name]
    assert isinstance(entry, IgnoredFlag)
    value = ["x"] if entry.takes_value else []
    kept, notices = translated(["serve", name, *value, "m"])
    assert kept == ["serve", "m"]
    (notice,) = notices
    assert notice == f"{' '.join([name, *value])} has no effect: {entry.why}."
    assert "\n" not in notice
    for accepted in entry.accepted:
        assert translated(["serve", name, accepted]) == (["serve"], [])
    if not entry.takes_value:
        negated = f"--no-{name.removeprefix('--')}"
        assert translated(["serve", negated, "m"]) == (["serve", "m"], [f"{negated} has no effect: {entry.why}."])
    assert parsed("m", name, *value).params["model_argument"] == "m"


@pytest.mark.parametrize("name", [name for name, entry in TABLE.items() if isinstance(entry, RefusedFlag)])
def test_what_is_not_done_is_refused_by_name_with_a_remedy(name: str) -> None:
    entry = TABLE[name]
    assert isinstance(entry, RefusedFlag)
    assert entry.remedy
    value = ["x"] if entry.takes_value else []
    for words in ([name, *value], [f"{name}=x"], [underscored(name), *value]):
        with pytest.raises(UsageRefused) as caught:
            translated(["serve", "m", *words])
        assert str(caught.value).startswith(name)
        assert entry.remedy in str(caught.value)
        assert exit_code_of(caught.value) is CommandExitCode.USAGE
    for accepted in entry.accepted or ():
        assert translated(["serve", name, accepted, "m"]) == (["serve", "m"], [])
        assert translated(["serve", f"{name}={accepted}", "m"]) == (["serve", "m"], [])
    if entry.accepted is None:
        assert translated(["serve", f"--no-{name.removeprefix('--')}"]) == (["serve"], [])


@pytest.mark.parametrize("name", [name for name, entry in TABLE.items() if entry.takes_value and not isinstance(entry, RefusedFlag)])
@pytest.mark.parametrize("rest", [[], ["--port", "8000"], ["-q", "int8"], ["--"]])
def test_the_next_flag_is_never_taken_for_a_missing_value(name: str, rest: list[str]) -> None:
    """`--max-log-len --port 8000` served on the default port, with a notice about "--max-log-len --port"."""
    with pytest.raises(UsageRefused, match=f"^{name}: a value is missing$"):
        translated(["serve", "m", name, *rest])


@pytest.mark.parametrize(
    "word", ["--disable-uvicorn-access-log=", "--disable-uvicorn-access-log=x", "--no-calculate-kv-scales=x", "--disable-log-stats=1"]
)
def test_a_value_after_a_flag_without_one_is_refused(word: str) -> None:
    with pytest.raises(UsageRefused, match=f"^{word}: the flag takes no value"):
        translated(["serve", word])


def test_true_and_false_after_a_flag_without_a_value_are_done() -> None:
    """`--disable-uvicorn-access-log=false` turned the log off."""
    assert translated(["serve", "--disable-uvicorn-access-log=false", "--calculate-kv-scales=false"]) == (["serve"], [])
    assert translated(["serve", "--disable-uvicorn-access-log=true"]) == (["serve", "--request-log", "off"], [])


def test_an_empty_value_is_a_missing_one() -> None:
    with pytest.raises(UsageRefused, match=r"^--data-parallel-size: a value is missing$"):
        translated(["serve", "--data-parallel-size="])


def test_a_negative_number_is_a_value_and_no_flag() -> None:
    kept, [notice] = translated(["serve", "--max-log-len", "-1", "--port", "8000"])
    assert kept == ["serve", "--port", "8000"]
    assert notice.startswith("--max-log-len -1 has no effect: ")


def test_every_flag_that_a_message_names_is_taken() -> None:
    """A remedy that is then refused is none."""
    for name, entry in TABLE.items():
        text = entry.remedy if isinstance(entry, RefusedFlag) else entry.why if isinstance(entry, IgnoredFlag) else " ".join(entry.ours)
        assert set(re.findall(r"--[a-z][a-z-]+", text)) <= TAKEN, name


def test_no_flag_of_serve_is_in_the_table() -> None:
    assert "--kv-cache-dtype" in TAKEN
    assert not TAKEN & set(TABLE)
    assert set(SEVERAL) - TAKEN == {"--goodput"}


def test_the_documentation_says_of_each_flag_what_the_command_does() -> None:
    rows = [line.split("|") for line in (ROOT / "docs" / "config.md").read_text(encoding="utf-8").splitlines() if line.startswith("| `-")]
    for name, flag in TABLE.items():
        [said] = [row[2].replace("`", "") for row in rows if f"`{name}`" in row[1]]
        match flag:
            case RefusedFlag(remedy, accepted):
                assert remedy in said, name
                assert not [value for value in accepted or () if value not in said], name
            case IgnoredFlag(why):
                assert why in said, name
            case TranslatedFlag(ours):
                assert " ".join(ours) in said, name


def test_other_words_are_left_to_the_parser() -> None:
    arguments = ["serve", "m", "--port", "1", "--max-modl-len", "5"]
    assert translated(arguments) == (arguments, [])
    assert translated(["chat", "--", "--trust-remote-code"]) == (["chat", "--", "--trust-remote-code"], [])


@pytest.mark.parametrize("flag", sorted(flag for flag in TAKEN if flag.startswith("--")))
def test_underlogprobs_are_dashes(flag: str) -> None:
    param = next(param for param in SERVE.params if flag in (*param.opts, *param.secondary_opts))
    value = [] if getattr(param, "is_flag", False) else [NUMBER]
    if flag != "--help":
        given = parsed(underscored(flag), *value).params[param.name or ""]
        assert given is not None
        assert given == parsed(flag, *value).params[param.name or ""]


@pytest.mark.parametrize(
    ("words", "names", "model"),
    [
        (["m", "--served-model-name", "a", "b", "c", "--port", "5"], ["a", "b", "c"], "m"),
        (["m", "--served_model_name=a", "b"], ["a", "b"], "m"),
        (["m", "--served-model-name", "a", "--served-model-name", "b"], ["a", "b"], "m"),
        (["--served-model-name", "a", "m"], ["a"], "m"),
        (["--model", "m", "--served-model-name", "a", "b"], ["a", "b"], None),
    ],
)
def test_several_values_may_follow_one_flag(words: list[str], names: list[str], model: str | None) -> None:
    params = parsed(*words).params
    assert list(params["served_model_name"]) == names
    assert params["model_argument"] == model


@pytest.mark.parametrize(
    ("words", "modules", "model"),
    [
        (["m", "--lora-modules", "a=/x", "b=/y=z", "--port", "5"], ["a=/x", "b=/y=z"], "m"),
        (["m", "--lora-modules", "a=/x", "--lora_modules=b=/y"], ["a=/x", "b=/y"], "m"),
        (["--enable-lora", "--lora-modules", "a=/x", "b=/y", "m"], ["a=/x", "b=/y"], "m"),
        (["--lora-modules", '{"name": "a", "path": "/x"}', "b=/y", "--model", "m"], ['{"name": "a", "path": "/x"}', "b=/y"], None),
    ],
)
def test_several_adapters_may_follow_one_flag(words: list[str], modules: list[str], model: str | None) -> None:
    params = parsed(*words).params
    assert list(params["lora_modules"]) == modules
    assert params["model_argument"] == model


def test_numbers_with_units_reach_the_configuration() -> None:
    params = parsed("m", "--max_model_len", "2k", "--kv-cache-memory-bytes", "2M", "--max-num-batched-tokens=4K").params
    assert (params["max_model_len"], params["kv_cache_bytes"], params["max_num_batched_tokens"]) == (2000, 2 << 20, 4096)
