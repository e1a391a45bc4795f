"""Tests the options of speculation: what is read, and what is refused by the name of its key."""

from __future__ import annotations

import re
from dataclasses import fields, replace
from pathlib import Path
from typing import Any

import pytest

from headrace.core.errors import ConfigError
from headrace.core.speculation import SPECULATIVE_METHODS, SpeculativeConfig
from headrace.core.strict_decode import decode, plain
from headrace.core.vllm_options import SPECULATIVE_KEYS, SPECULATIVE_METHOD_REMEDIES
from headrace.engine.config import EngineConfig

pytestmark = pytest.mark.pure

SECTION = "speculative_config"


def checked(given: object, device: str = "cpu") -> EngineConfig:
    return decode(EngineConfig, {"model": "m", "device": device, SECTION: given}).checked()


@pytest.mark.parametrize(
    "given",
    [
        {"method": "ngram"},
        {"method": "ngram", "num_speculative_tokens": 16, "prompt_lookup_min": 1, "prompt_lookup_max": 64},
        {"method": "suffix", "num_speculative_tokens": 1},
        {"method": "draft_model", "model": "headrace-draft"},
    ],
)
def test_what_is_given_is_held_and_read_again_as_it_is(given: dict[str, Any]) -> None:
    config = checked(given)
    assert {name: value for name, value in plain(config.speculative_config).items() if name in given} == given
    assert decode(EngineConfig, plain(config)).checked() == config


def test_without_it_nothing_is_drafted() -> None:
    assert checked(None) == decode(EngineConfig, {"model": "m", "device": "cpu"}).checked()
    assert checked(None).speculative_config is None


@pytest.mark.parametrize(
    ("fewest", "most", "looked_for"),
    [(None, None, (3, 5)), (None, 2, (2, 2)), (None, 9, (3, 9)), (1, None, (1, 5)), (7, None, (7, 7)), (2, 4, (2, 4))],
)
def test_of_the_two_bounds_one_that_is_not_set_fits_the_other(fewest: int | None, most: int | None, looked_for: tuple[int, int]) -> None:
    given = {"method": "ngram", "prompt_lookup_min": fewest, "prompt_lookup_max": most}
    config = checked(given).speculative_config
    assert config is not None
    assert config.prompt_lookup == looked_for


NGRAM: dict[str, Any] = {"method": "ngram"}


@pytest.mark.parametrize(
    ("given", "where", "what"),
    [
        ({}, ".method", "is missing. Give one of ngram, suffix, draft_model"),
        ({"model": "x", "num_speculative_tokens": 5}, ".method", "is missing. Give one of ngram, suffix, draft_model; with `model`, "),
        ([], "", "expected object or null, got array"),
        ("ngram", "", "expected object or null, got str"),
        ({"method": "lookahead"}, ".method", "'lookahead' is not one of ngram, suffix, draft_model"),
        ({"method": None}, ".method", "expected str, got null"),
        (NGRAM | {"num_speculative_tokens": 0}, ".num_speculative_tokens", "0 is outside 1..16"),
        (NGRAM | {"num_speculative_tokens": 17}, ".num_speculative_tokens", "17 is outside 1..16"),
        (NGRAM | {"num_speculative_tokens": "5"}, ".num_speculative_tokens", "expected int, got str"),
        (NGRAM | {"num_speculative_tokens": True}, ".num_speculative_tokens", "expected int, got bool"),
        (NGRAM | {"prompt_lookup_min": 0}, ".prompt_lookup_min", "0 is outside 1..64"),
        (NGRAM | {"prompt_lookup_max": 65}, ".prompt_lookup_max", "65 is outside 1..64"),
        (NGRAM | {"prompt_lookup_min": 5, "prompt_lookup_max": 4}, ".prompt_lookup_min", "5 is more than prompt_lookup_max (4)"),
        (NGRAM | {"num_speculative_token": 5}, ".num_speculative_token", "Did you mean num_speculative_tokens?"),
        (NGRAM | {"zzz": 5}, ".zzz", "Known: method, num_speculative_tokens, prompt_lookup_min, prompt_lookup_max, model."),
        (NGRAM | {"model": "x"}, ".model", "is for the method draft_model, and this one is ngram"),
        ({"method": "suffix", "prompt_lookup_min": 2}, ".prompt_lookup_min", "is for the method ngram, and this one is suffix"),
        ({"method": "suffix", "prompt_lookup_max": 2}, ".prompt_lookup_max", "is for the method ngram, and this one is suffix"),
        ({"method": "suffix", "model": "x"}, ".model", "is for the method draft_model, and this one is suffix"),
        ({"method": "draft_model", "model": "x", "prompt_lookup_max": 2}, ".prompt_lookup_max", "and this one is draft_model"),
        ({"method": "draft_model"}, ".model", "is missing"),
        ({"method": "draft_model", "model": ""}, ".model", "is missing"),
        *(({"method": method}, ".method", f"{method!r} is not supported. {why}") for method, why in SPECULATIVE_METHOD_REMEDIES.items()),
        *((NGRAM | {key: 1}, f".{key}", f"is not supported. {why}") for key, why in SPECULATIVE_KEYS.items()),
    ],
)
def test_what_does_not_fit_is_refused_under_its_key(given: object, where: str, what: str) -> None:
    with pytest.raises(ConfigError, match=re.escape(what)) as caught:
        checked(given)
    assert caught.value.where == SECTION + where


def test_no_key_and_no_method_is_both_here_and_refused() -> None:
    assert not {item.name for item in fields(SpeculativeConfig)} & set(SPECULATIVE_KEYS)
    assert not set(SPECULATIVE_METHODS) & set(SPECULATIVE_METHOD_REMEDIES)
    assert all(why.endswith(".") for why in (*SPECULATIVE_KEYS.values(), *SPECULATIVE_METHOD_REMEDIES.values()))


@pytest.mark.parametrize("given", [NGRAM, {"method": "suffix"}, {"method": "draft_model", "model": "x"}])
def test_it_is_refused_on_a_gpu(given: dict[str, Any]) -> None:
    with pytest.raises(ConfigError, match=r"^speculative_config: is not supported on a GPU yet\. .*device = cpu"):
        checked(given, device="cuda")


def test_the_model_and_the_one_that_drafts_get_folders() -> None:
    resolved = checked({"method": "draft_model", "model": "x"}).with_folders(Path("/models").joinpath)
    assert resolved.speculative_config == SpeculativeConfig(method="draft_model", model="/models/x")
    assert resolved.model == "/models/m"
    for given in (NGRAM, None):
        config = checked(given)
        assert config.with_folders(Path("/models").joinpath) == replace(config, model="/models/m")

    def missing(name: str) -> Path:
        if name == "x":
            raise ConfigError("model", f"there is no folder {name}")
        return Path(name)

    with pytest.raises(ConfigError, match=r"^speculative_config\.model: there is no folder x"):
        checked({"method": "draft_model", "model": "x"}).with_folders(missing)
