"""Tests `headrace config import`: what is mapped, that all else is listed, and that no secret and no line of the file gets through."""

from __future__ import annotations

import copy
import re
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from headrace.cli.config.litellm import COSTS, imported
from headrace.cli.config.load import load
from headrace.cli.config.yaml_files import parse_yaml
from headrace.core.errors import ConfigError
from tests.cli.conftest import Headrace

pytestmark = pytest.mark.pure

SECRET = "sk-0123456789abcdef"

PROXY = """
model_list:
  - model_name: gpt-4o
    litellm_params: {model: openai/gpt-4o, api_key: os.environ/OPENAI_KEY, order: 1, rpm: 500}
    model_info: {id: primary, mode: chat, input_cost_per_token: 0.0000025, output_cost_per_token: 1e-5}
  - model_name: gpt-4o
    litellm_params: {model: openrouter/openai/gpt-4o, weight: 2}
  - model_name: gpt-4o
    litellm_params: {model: azure/gpt-4o-eu, api_base: "https://eu.openai.azure.com", api_version: "2024-10-21", api_key: os.environ/AZ}
  - model_name: llama
    litellm_params: {model: hosted_vllm/meta-llama/Llama-3.3-70B, api_base: "http://10.0.0.5:8000/v1/", api_key: sk-0123456789abcdef}
  - model_name: claude
    litellm_params: {model: anthropic/claude-sonnet-4-5}
  - model_name: embed
    litellm_params: {model: openai/text-embedding-3-small}
    model_info: {mode: embedding}
  - {model_name: "openai/*", litellm_params: {model: "openai/*"}}
router_settings:
  routing_strategy: latency-based-routing
  num_retries: 2
  model_group_alias: {gpt-4: gpt-4o, hidden-one: {model: claude, hidden: true}, lost: embed}
  fallbacks: [{gpt-4o: [claude, llama, embed]}]
litellm_settings:
  request_timeout: 600
  success_callback: [langfuse]
  default_fallbacks: [llama]
  context_window_fallbacks: [{gpt-4o: [gpt-4]}, {llama: claude}]
  cache: true
  cache_params: {type: redis, host: localhost, port: 6379, ttl: 600, namespace: proxy}
general_settings:
  master_key: sk-0123456789abcdef
  database_url: postgresql://user:sk-0123456789abcdef@db/litellm
guardrails: [{guardrail_name: pii, litellm_params: {guardrail: presidio, mode: pre_call}}]
environment_variables: {LANGFUSE_SECRET_KEY: sk-0123456789abcdef}
"""

MAPPED: dict[str, Any] = {
    "models": [
        {
            "name": "gpt-4o",
            "upstreams": [
                {
                    "url": "https://api.openai.com/v1",
                    "model": "gpt-4o",
                    "api_key_env": "OPENAI_KEY",
                    "cache_salt": False,
                    "order": 1,
                    "name": "primary",
                },
                {
                    "url": "https://openrouter.ai/api/v1",
                    "model": "openai/gpt-4o",
                    "api_key_env": "OPENROUTER_API_KEY",
                    "cache_salt": False,
                    "order": 2,
                },
            ],
            "aliases": ["gpt-4"],
            "fallbacks": {"failed": ["claude", "llama"], "busy": ["claude", "llama"], "content_policy": ["claude", "llama"]},
        },
        {
            "name": "llama",
            "upstreams": [{"url": "http://10.0.0.5:8000/v1", "model": "meta-llama/Llama-3.3-70B"}],
            "fallbacks": {"context_window": ["claude"]},
        },
        {
            "name": "claude",
            "upstreams": [
                {
                    "url": "https://api.anthropic.com/v1",
                    "model": "claude-sonnet-4-5",
                    "api_key_env": "ANTHROPIC_API_KEY",
                    "cache_salt": False,
                }
            ],
            "aliases": ["hidden-one"],
            "fallbacks": {"failed": ["llama"], "busy": ["llama"], "content_policy": ["llama"]},
        },
    ],
    "prices": {"gpt-4o": {"input": 2.5, "output": 10.0}},
    "gateway": {"cache": {"enabled": True, "ttl_s": 600}, "store": {"url": "redis://localhost:6379/0"}},
}

MISSED = [
    "model_list[2].litellm_params.model",
    "model_list[3].litellm_params.api_key",
    "model_list[5].model_info.mode",
    "model_list[6]",
    "router_settings.model_group_alias.hidden-one.hidden",
    "router_settings.model_group_alias.lost",
    "router_settings.fallbacks[0].gpt-4o",
    "model_list[0].litellm_params.rpm",
    "model_list[1].litellm_params.weight",
    "router_settings.routing_strategy",
    "router_settings.num_retries",
    "litellm_settings.request_timeout",
    "litellm_settings.success_callback",
    "litellm_settings.cache_params.namespace",
    "general_settings.master_key",
    "general_settings.database_url",
    "guardrails",
    "environment_variables",
]


def proxy() -> Any:
    return parse_yaml(PROXY, "config.yaml")


def one(params: dict[str, Any], **sections: Any) -> tuple[Any, list[str]]:
    config, missed = imported({"model_list": [{"model_name": "m", "litellm_params": params}], **sections})
    return config, [str(each) for each in missed]


def test_a_whole_proxy_is_mapped_and_the_rest_is_listed() -> None:
    config, missed = imported(proxy())
    assert config == MAPPED
    assert sorted(each.where for each in missed) == sorted(MISSED)


@pytest.mark.parametrize(
    ("params", "url", "model", "variable"),
    [
        ({"model": "gpt-4o-mini"}, "https://api.openai.com/v1", "gpt-4o-mini", "OPENAI_API_KEY"),
        ({"model": "claude-haiku-4-5"}, "https://api.anthropic.com/v1", "claude-haiku-4-5", "ANTHROPIC_API_KEY"),
        ({"model": "groq/llama-3.3-70b"}, "https://api.groq.com/openai/v1", "llama-3.3-70b", "GROQ_API_KEY"),
        ({"model": "groq/x", "api_key": "os.environ/MY_KEY"}, "https://api.groq.com/openai/v1", "x", "MY_KEY"),
        ({"model": "fireworks_ai/x"}, "https://api.fireworks.ai/inference/v1", "accounts/fireworks/models/x", "FIREWORKS_API_KEY"),
        ({"model": "x/y", "custom_llm_provider": "together_ai"}, "https://api.together.xyz/v1", "x/y", "TOGETHERAI_API_KEY"),
        ({"model": "openai/x", "api_base": "http://10.0.0.7:80/v1/chat/completions"}, "http://10.0.0.7:80/v1", "x", None),
        ({"model": "ollama_chat/llama3"}, "http://localhost:11434/v1", "llama3", None),
        ({"model": "ollama/llama3", "api_base": "http://gpu:11434"}, "http://gpu:11434/v1", "llama3", None),
        ({"model": "hosted_vllm/a/b", "base_url": "http://gpu:8000/v1"}, "http://gpu:8000/v1", "a/b", None),
    ],
)
def test_a_deployment_is_an_upstream(params: dict[str, Any], url: str, model: str, variable: str | None) -> None:
    config, missed = one(params)
    (upstream,) = config["models"][0]["upstreams"]
    assert (upstream["url"], upstream["model"], upstream.get("api_key_env")) == (url, model, variable)
    assert upstream.get("cache_salt", True) == (variable is None), "a provider's own API refuses unknown fields"
    assert not missed


@pytest.mark.parametrize(
    ("params", "said"),
    [
        ({"model": "bedrock/anthropic.claude-v2"}, "AWS keys"),
        ({"model": "vertex_ai/gemini-2.0-flash"}, "Google's tokens"),
        ({"model": "azure/my-deployment"}, "/openai/v1"),
        ({"model": "replicate/meta/llama"}, 'names the provider "replicate", which is not mapped'),
        ({"model": "mystery"}, "names no provider"),
        ({"model": "hosted_vllm/a"}, "is no address"),
        ({"model": "openai/a", "api_base": "os.environ/BASE"}, "is no address"),
        ({"model": "anthropic/a", "api_base": "http://10.0.0.5"}, "is not the address of anthropic's OpenAI-compatible API"),
        ({"model": "openai/*"}, "is a pattern"),
        ({"model": 3}, "lacks model_name or litellm_params.model"),
    ],
)
def test_a_deployment_that_cannot_be_one_is_listed_once(params: dict[str, Any], said: str) -> None:
    config, missed = one({**params, "rpm": 3})
    assert config["models"] == []
    (note,) = missed
    assert said in note


def test_the_highest_cost_of_a_models_servers_is_its_price() -> None:
    """The price holds whichever server answers; a budget that counts less than was spent would not hold."""
    costs: list[dict[str, Any]] = [{"input_cost_per_token": 1e-6, "output_cost_per_token": 2e-6}, {"input_cost_per_token": 3e-6}]
    config, missed = imported({"model_list": [{"model_name": "m", "litellm_params": {"model": "gpt-4o", **each}} for each in costs]})
    assert config["prices"] == {"m": {"input": 3.0, "output": 2.0}}
    assert [each.where for each in missed] == ["model_list[1]"]


@pytest.mark.parametrize("cost", ["1", True, -1e-6, 2.0, float("inf"), float("nan"), None, [1]])
def test_a_cost_that_is_none_is_listed(cost: object) -> None:
    for key in COSTS:
        config, missed = one({"model": "gpt-4o", key: cost})
        assert "prices" not in config
        assert missed == [f"model_list[0].litellm_params.{key}: is no cost of a token."]


@pytest.mark.parametrize(
    ("settings", "gateway"),
    [
        ({"cache": False}, None),
        ({"cache": True}, {"cache": {"enabled": True}}),
        ({"cache": True, "cache_params": {"type": "local", "ttl": 5}}, {"cache": {"enabled": True, "ttl_s": 5}}),
        ({"cache": True, "cache_params": {"type": "redis-semantic", "host": "localhost"}}, None),
        ({"cache": True, "cache_params": {"type": "local", "mode": "default_off"}}, None),
        ({"cache": True, "cache_params": {"type": "redis", "host": "redis.internal"}}, {"cache": {"enabled": True}}),
        ({"cache": True, "cache_params": {"host": "localhost", "password": SECRET}}, {"cache": {"enabled": True}}),
        ({"cache": True, "cache_params": {"host": "localhost:1/?x", "port": 1}}, {"cache": {"enabled": True}}),
        (
            {"cache": True, "cache_params": {"host": "127.0.0.1"}},
            {"cache": {"enabled": True}, "store": {"url": "redis://127.0.0.1:6379/0"}},
        ),
    ],
)
def test_the_cache_is_mapped_where_it_means_the_same(settings: dict[str, Any], gateway: object) -> None:
    left = {f"litellm_settings.cache_params.{key}" for key in ("host", "password") if key in settings.get("cache_params", {})}
    config, missed = one({"model": "gpt-4o"}, litellm_settings=settings)
    assert config.get("gateway") == gateway
    if gateway is None or "store" not in gateway:  # type: ignore[operator]
        assert left <= {note.partition(": ")[0] for note in missed}


def test_the_routers_fallbacks_win_and_the_general_ones_are_for_every_reason_without_a_list() -> None:
    models = [{"model_name": name, "litellm_params": {"model": "gpt-4o"}} for name in "abc"]
    router = {"fallbacks": [{"a": ["b"]}, {"*": "c"}], "model_group_alias": {"alias": "c"}}
    settings = {"fallbacks": [{"a": ["c"]}], "content_policy_fallbacks": [{"b": ["alias", "b", "c"]}]}
    config, missed = imported({"model_list": models, "router_settings": router, "litellm_settings": settings})
    assert isinstance(config["models"], list)
    to_c = {"failed": ["c"], "busy": ["c"], "context_window": ["c"]}
    assert [model.get("fallbacks") for model in config["models"]] == [
        {"failed": ["b"], "busy": ["b"], "context_window": ["b"]},
        {**to_c, "content_policy": ["c"]},
        None,
    ]
    assert [str(each) for each in missed] == ["litellm_settings.fallbacks: is not read. router_settings.fallbacks wins."]


SECTIONS = ["", "router_settings", "litellm_settings", "general_settings", "litellm_settings.cache_params"]
PLACES = [*SECTIONS, "model_list[0]", "model_list[0].litellm_params", "model_list[0].model_info"]


@pytest.mark.parametrize("where", PLACES)
@pytest.mark.parametrize("value", [1, "text", [{"a": 1}], {"a": 1}])
def test_an_unknown_key_is_listed_wherever_it_stands(where: str, value: object) -> None:
    raw = proxy()
    place = raw
    for step in re.findall(r"\w+", where):
        place = place[int(step)] if step.isdecimal() else place[step]
    place["never_seen"] = value
    config, missed = imported(raw)
    assert config == MAPPED
    assert f"{where}.never_seen".removeprefix(".") in {each.where for each in missed}


ANYTHING = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=8),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=8), inner, max_size=3),
    max_leaves=6,
)


@given(data=st.data())
def test_values_of_any_type_are_listed_or_mapped_and_raise_nothing_else(data: st.DataObject) -> None:
    raw = copy.deepcopy(proxy())
    place: Any = raw
    while True:
        key = data.draw(st.sampled_from(range(len(place)) if isinstance(place, list) else sorted(place)))
        if isinstance(place[key], dict | list) and place[key] and data.draw(st.booleans()):
            place = place[key]
            continue
        place[key] = data.draw(ANYTHING)
        break
    try:
        config, missed = imported(raw)
    except ConfigError:
        assert not isinstance(raw["model_list"], list)
        return
    assert isinstance(config["models"], list)
    assert all(each.where and each.reason for each in missed)


def write(tmp_path: Path, text: str) -> Path:
    file = tmp_path / "config.yaml"
    file.write_text(text)
    return file


def test_the_command_prints_what_loads_and_shows_no_secret(headrace: Headrace, tmp_path: Path) -> None:
    done = headrace("config", "import", str(write(tmp_path, PROXY)))
    assert done.returncode == 0, done.stderr
    result = tmp_path / "headrace.yaml"
    result.write_text(done.stdout)
    config = load(result, {})
    assert [model.served_name for model in config.models] == ["gpt-4o", "llama", "claude"]
    assert config.prices["gpt-4o"].input == 2.5
    assert SECRET not in done.stdout + done.stderr
    notes = [line.removeprefix("headrace: ") for line in done.stderr.splitlines()]
    assert [line.removeprefix("# ") for line in done.stdout.splitlines() if line.startswith("# ")] == ["Not mapped:", *notes]
    assert any("general_settings.master_key: is not mapped. headrace keys create" in note for note in notes)


def test_the_command_maps_fallbacks(headrace: Headrace, tmp_path: Path) -> None:
    output = tmp_path / "headrace.yaml"
    done = headrace("config", "import", str(write(tmp_path, PROXY)), "--output", str(output))
    assert done.returncode == 0, done.stderr
    assert headrace("config", "show", str(output)).returncode == 0


def test_a_file_that_exists_is_left_alone(headrace: Headrace, tmp_path: Path) -> None:
    file = write(tmp_path, "model_list: [{model_name: m, litellm_params: {model: gpt-4o}}]")
    done = headrace("config", "import", str(file), "--output", str(file))
    assert done.returncode == 3
    assert "An existing file is left alone" in done.stderr
    assert "model_list" in file.read_text()


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("", "model_list: is missing"),
        ("models: [{engine: {model: headrace-tiny}}]", "model_list: is missing"),
        ("- a", "is not a mapping"),
        ("model_list: []", "names no model that could be imported"),
        ("model_list: [{model_name: m, litellm_params: {model: bedrock/x}}]", "names no model that could be imported"),
        ("model_list: [{model_name: m, litellm_params: {model: openai/x, api_base: 'http://u:sk-0123@h/v1'}}]", "imported, models[0].up"),
        ("a: &x [1]\nmodel_list: *x", "aliases (*name) are not allowed"),
        ("model_list: !!python/object/apply:os.system [ls]", "is not valid YAML"),
        ("model_list: " + "[" * 5000, "nested too deeply"),
        ("model_list: []\nmodel_list: []", "is given twice"),
    ],
)
def test_a_file_that_cannot_be_imported_is_refused(headrace: Headrace, tmp_path: Path, text: str, said: str) -> None:
    done = headrace("config", "import", str(write(tmp_path, text)))
    assert done.returncode == 3
    assert said in done.stderr
    assert done.stdout == ""
    assert "sk-0123" not in done.stderr


def test_no_key_and_no_name_of_the_file_becomes_a_line_of_the_result(headrace: Headrace, tmp_path: Path) -> None:
    evil = r'"x\ngateway: {host: 0.0.0.0, access: open}"'
    model = "model_list: [{model_name: m, litellm_params: {model: gpt-4o}}]"
    text = f"{evil}: 1\nrouter_settings: {{{evil}: 1, model_group_alias: {{{evil}: m}}, fallbacks: [{{{evil}: [m]}}, {{m: [{evil}]}}]}}\n"
    done = headrace("config", "import", str(write(tmp_path, text + model)))
    assert done.returncode == 0, done.stderr
    assert list(parse_yaml(done.stdout, "-")) == ["models"]  # type: ignore[call-overload]
    assert len(done.stderr.splitlines()) == 5
