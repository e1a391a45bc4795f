"""Makes a configuration of that of a LiteLLM proxy: `headrace config import`.

What is mapped is taken out of the parsed file, and what is left in the end is listed: no key is passed over in silence. No value is shown
but names of models and providers, because it may be a secret.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from typing import Any

from headrace.cli.config.yaml_files import Raw
from headrace.core.errors import ConfigError, shorten
from headrace.core.model_names import MODEL_NAME
from headrace.core.strict_decode import joined
from headrace.gateway.upstream.model_config import MAX_ORDER, REPLICA_NAME
from headrace.machine.hosts import is_loopback
from headrace.policy.fallbacks import MAX_FALLBACKS
from headrace.policy.limits.price import MAX_PRICE, PRICE_DECIMALS

Missed = list[ConfigError]
"""Keys that are not mapped: path in LiteLLM's file, reason, and what Headrace has instead."""

Models = dict[str, dict[str, Any]]
"""Headrace's `models` by name, and likewise its `prices`."""


OLLAMA = ("http://localhost:11434/v1", "")
PROVIDERS = {
    "anthropic": ("https://api.anthropic.com/v1", "ANTHROPIC_API_KEY"),
    "cerebras": ("https://api.cerebras.ai/v1", "CEREBRAS_API_KEY"),
    "deepseek": ("https://api.deepseek.com/v1", "DEEPSEEK_API_KEY"),
    "fireworks_ai": ("https://api.fireworks.ai/inference/v1", "FIREWORKS_API_KEY"),
    "gemini": ("https://generativelanguage.googleapis.com/v1beta/openai", "GEMINI_API_KEY"),
    "groq": ("https://api.groq.com/openai/v1", "GROQ_API_KEY"),
    "mistral": ("https://api.mistral.ai/v1", "MISTRAL_API_KEY"),
    "openai": ("https://api.openai.com/v1", "OPENAI_API_KEY"),
    "openrouter": ("https://openrouter.ai/api/v1", "OPENROUTER_API_KEY"),
    "perplexity": ("https://api.perplexity.ai", "PERPLEXITYAI_API_KEY"),
    "together_ai": ("https://api.together.xyz/v1", "TOGETHERAI_API_KEY"),
    "xai": ("https://api.x.ai/v1", "XAI_API_KEY"),
    "ollama": OLLAMA,
    "ollama_chat": OLLAMA,
    **dict.fromkeys(("custom_openai", "hosted_vllm", "litellm_proxy", "lm_studio", "openai_like"), ("", "")),
}
"""Prefix of `litellm_params.model` -> address of the OpenAI-compatible API, empty where each server has its own, and the variable with
its key.
"""

OWN_API = ("anthropic", "gemini")
"""Providers whose `api_base` is that of an API of another form."""

_AZURE = "Azure's v1 API is OpenAI's: write an upstream with url https://RESOURCE.openai.azure.com/openai/v1 and the deployment as model."
_AWS = "Its requests are signed with AWS keys, which is not done here: an OpenAI-compatible server before it can be an upstream."
_GOOGLE = "It wants Google's tokens of an hour, which are not fetched here: gemini/ has an OpenAI-compatible API with a key."
OTHER_APIS = {
    **dict.fromkeys(("azure", "azure_ai", "azure_text"), f"Its api-version and api-key header are not sent. {_AZURE}"),
    **dict.fromkeys(("bedrock", "sagemaker", "sagemaker_chat"), _AWS),
    **dict.fromkeys(("vertex_ai", "vertex_ai_beta"), _GOOGLE),
}
BARE_NAMES = (("openai", re.compile(r"gpt-|chatgpt-|o[1-9]|ft:gpt-")), ("anthropic", re.compile(r"claude-")))
"""Names without a prefix, as far as they say whose they are."""

COSTS = {"input_cost_per_token": "input", "output_cost_per_token": "output", "cache_read_input_token_cost": "cached_input"}

FALLBACKS = {
    "fallbacks": ("failed", "busy"),
    "context_window_fallbacks": ("context_window",),
    "content_policy_fallbacks": ("content_policy",),
}
"""LiteLLM's key -> the reasons for which Headrace asks these models."""

SECTIONS = {"litellm_params", "model_info", "litellm_settings", "router_settings", "general_settings", "cache_params"}

WAYS = {
    name: way
    for names, way in (
        ("weight", "Servers of one order share requests by their load; routes weigh models."),
        ("rpm tpm", "A server's own 429 holds requests back from it; tiers limit tenants."),
        ("max_parallel_requests global_max_parallel_requests", "gateway.limits.max_requests bounds all, tiers each tenant."),
        ("order", "It is a whole number from 0 to 100."),
        (
            "timeout stream_timeout request_timeout",
            "upstreams[N].silence_s bounds the wait for a token, gateway.timeouts.request_s a whole request.",
        ),
        ("num_retries max_retries retry_after retry_policy", "A request has three attempts, or one per server where there are more."),
        ("allowed_fails cooldown_time disable_cooldowns", "Five failures in a row open a server's circuit for 5 s."),
        ("routing_strategy routing_strategy_args", "Of the lowest order, the less loaded of two random servers is asked."),
        ("enable_pre_call_checks", "A server whose context is known to be too short is not asked."),
        ("drop_params additional_drop_params modify_params", "A field that a server refuses is left out only where no answer changes."),
        ("headers extra_headers organization api_version", "No header of the configuration is sent."),
        ("temperature top_p max_tokens stop seed", "Nothing is added to a request: clients choose."),
        ("callbacks success_callback failure_callback service_callbacks", "See /metrics, usage and gateway.otlp_traces_endpoint."),
        ("set_verbose json_logs turn_off_message_logging", "log_format is of the whole log; prompts are never logged."),
        ("cache cache_params", "gateway.cache gives equal requests their answer again."),
        ("type", "Answers lie in files or at gateway.store.url, and only equal requests are given them again."),
        ("mode", "gateway.cache.enabled holds for all requests but those that say no-cache and no-store."),
        (
            "host port username password ssl redis_host redis_port redis_password redis_url",
            "gateway.store.url names a Redis or Valkey; beyond loopback it wants TLS and password_file, or allow_insecure.",
        ),
        ("master_key", "headrace keys create makes keys; none is copied."),
        ("database_url", "Keys, limits and usage lie in the folder state, or at gateway.store.url."),
        ("guardrails prompt_guards", "Requests are not filtered here: a server's own filter answers content_filter."),
        ("environment_variables", "Set them for headrace serve itself."),
        ("include", "Import each file by itself."),
        ("base_model supports_function_calling supports_vision max_input_tokens max_output_tokens", "The server is asked."),
    )
    for name in names.split()
}


def imported(raw: Raw) -> tuple[Raw, Missed]:
    """Headrace's configuration, not checked, and what it lacks. raw: LiteLLM's, which loses what is mapped. Raises ConfigError for a file
    that has no `model_list`."""
    entries, missed = raw.get("model_list"), list[ConfigError]()
    if not isinstance(entries, list):
        raise ConfigError("model_list", "is missing, or is no list", "Give the config.yaml of a LiteLLM proxy.")
    router, settings = (_section(raw, name) for name in ("router_settings", "litellm_settings"))
    models: Models = {}
    prices: Models = {}
    for index, each in enumerate(entries):
        entry = each if isinstance(each, dict) else {}
        try:
            _deployment(f"model_list[{index}]", entry, models, prices, missed)
        except ConfigError as error:
            missed.append(error)
            entry.clear()
    for model in models.values():
        _place_last(model["upstreams"])
    names = {name: name for name in models} | _aliases(router, models, missed)
    _fallbacks({"router_settings": router, "litellm_settings": settings}, models, names, missed)
    config: Raw = {"models": list(models.values())}
    if prices:
        config["prices"] = prices
    if gateway := _gateway(settings):
        config["gateway"] = gateway
    missed.extend(_left(raw, ""))
    return config, missed


def _section(place: Raw, name: str) -> Raw:
    """Empty where it is missing or no mapping."""
    section = place.get(name)
    return section if isinstance(section, dict) else {}


def _left(section: Raw, where: str) -> Iterator[ConfigError]:
    for key, value in section.items():
        path = joined(where, key)
        if path == "model_list" and isinstance(value, list):
            for index, entry in enumerate(value):
                yield from _left(entry if isinstance(entry, dict) else {}, f"{path}[{index}]")
        elif key in SECTIONS and isinstance(value, dict):
            yield from _left(value, path)
        elif value not in ({}, None):
            yield ConfigError(path, "is not mapped", WAYS.get(key, "Headrace has nothing like it."))


def _deployment(where: str, entry: Raw, models: Models, prices: Models, missed: Missed) -> None:
    """Add one entry of `model_list`. Raises ConfigError for one that cannot be mapped as a whole."""
    name, params, info = entry.pop("model_name", None), _section(entry, "litellm_params"), _section(entry, "model_info")
    if not isinstance(name, str) or not isinstance(params.get("model"), str):
        raise ConfigError(where, "lacks model_name or litellm_params.model")
    if "*" in name or "*" in str(params["model"]):
        raise ConfigError(where, f"{shorten(name)} is a pattern", "Name each model in an entry of its own.")
    if MODEL_NAME.fullmatch(name) is None:
        raise ConfigError(f"{where}.model_name", f"{shorten(name)} is no model name", "Letters, digits and ._/:@- only, at most 256.")
    if info.get("mode") in (None, "chat", "completion", "responses"):
        info.pop("mode", None)
    else:
        raise ConfigError(f"{where}.model_info.mode", f"is {shorten(info['mode'])}", "Only text is generated.")
    upstream = _upstream(f"{where}.litellm_params", params, missed)
    if REPLICA_NAME.fullmatch(str(info.get("id", ""))):
        upstream["name"] = str(info.pop("id"))
    models.setdefault(name, {"name": name, "upstreams": []})["upstreams"].append(upstream)
    price = _price(f"{where}.model_info", info, missed) | _price(f"{where}.litellm_params", params, missed)
    before = prices.setdefault(name, price) if price else price
    if before != price:
        missed.append(ConfigError(where, f"has other costs than an entry of {name} before it", "The highest are taken."))
        both = [{"cached_input": each["input"], **each} if "input" in each else each for each in (before, price)]  # no discount
        prices[name] = {key: max(each[key] for each in both if key in each) for key in before | price}


def _upstream(where: str, params: Raw, missed: Missed) -> Raw:
    provider, model = _provider(params)
    if provider not in PROVIDERS:
        remedy = OTHER_APIS.get(provider, "Where it has an OpenAI-compatible API, write an upstream with its url.")
        named = f"the provider {shorten(provider)}, which is not mapped" if provider else "no provider"
        raise ConfigError(f"{where}.model", f"names {named}", remedy)
    own_url, variable = PROVIDERS[provider]
    base = params.pop("api_base", None) or params.pop("base_url", None) or own_url
    if not isinstance(base, str) or not base or base.startswith("os.environ/"):
        raise ConfigError(f"{where}.api_base", "is no address, and a variable's value is not read", "Write an upstream with its url.")
    url = base.rstrip("/").removesuffix("/chat/completions")
    if provider.startswith("ollama"):
        url = f"{url.removesuffix('/v1')}/v1"
    if provider in OWN_API and url != own_url:
        raise ConfigError(
            f"{where}.api_base", f"is not the address of {provider}'s OpenAI-compatible API", "Write an upstream with its url."
        )
    if provider == "fireworks_ai" and not model.startswith("accounts/"):
        model = f"accounts/fireworks/models/{model}"
    upstream: Raw = {"url": url, "model": model, **_key(where, params, variable if url == own_url else "", missed)}
    if url == own_url and variable:
        upstream["cache_salt"] = False
    order = params.get("order")
    if type(order) is int and 0 <= order <= MAX_ORDER:
        upstream["order"] = params.pop("order")
    return upstream


def _provider(params: Raw) -> tuple[str, str]:
    """Provider, empty for an unknown one, and the model's name there."""
    model, given = str(params.pop("model")), params.pop("custom_llm_provider", None)
    if isinstance(given, str):
        return given, model.removeprefix(f"{given}/")
    prefix, slash, rest = model.partition("/")
    if slash:
        return prefix, rest
    return next((provider for provider, names in BARE_NAMES if names.match(model)), ""), model


def _key(where: str, params: Raw, variable: str, missed: Missed) -> Raw:
    """variable: for an entry without a key"""
    key = params.pop("api_key", None)
    if key is None:
        return {"api_key_env": variable} if variable else {}
    if isinstance(key, str) and (found := re.fullmatch(r"os\.environ/(\w+)", key, re.ASCII)):
        return {"api_key_env": found[1]}
    remedy = "Write it into a file, closed to other users, and name that as api_key_file of the upstream."
    missed.append(ConfigError(f"{where}.api_key", "is a secret, and is not copied", remedy))
    return {}


def _price(where: str, section: Raw, missed: Missed) -> dict[str, float]:
    price = {}
    for key in [key for key in COSTS if key in section]:
        cost = section.pop(key)
        per_million = -1.0 if isinstance(cost, bool) or not isinstance(cost, int | float) else round(cost * 1e6, PRICE_DECIMALS)
        if 0 <= per_million <= MAX_PRICE:
            price[COSTS[key]] = per_million
        else:
            missed.append(ConfigError(f"{where}.{key}", "is no cost of a token"))
    return price


def _place_last(upstreams: list[dict[str, Any]]) -> None:
    """Servers without an order come after those with one, as in LiteLLM."""
    if orders := [each["order"] for each in upstreams if "order" in each]:
        for each in upstreams:
            each.setdefault("order", min(MAX_ORDER, max(orders) + 1))


def _aliases(router: Raw, models: Models, missed: Missed) -> dict[str, str]:
    """Each alias, and its model."""
    aliases: dict[str, str] = {}
    wanted = _section(router, "model_group_alias")
    for alias, target in wanted.items():
        where = f"router_settings.model_group_alias.{alias}"
        name = target.get("model") if isinstance(target, dict) else target
        if not isinstance(name, str) or name not in models or alias in models or MODEL_NAME.fullmatch(alias) is None:
            missed.append(
                ConfigError(where, "stands for a model that is not imported, or is a model's name, or has characters that no name may have")
            )
            continue
        if isinstance(target, dict) and target.get("hidden"):
            missed.append(ConfigError(f"{where}.hidden", "is not mapped", "Aliases are listed like models."))
        aliases[alias] = name
        models[name].setdefault("aliases", []).append(alias)
    wanted.clear()
    return aliases


def _fallbacks(sections: Mapping[str, Raw], models: Models, names: Mapping[str, str], missed: Missed) -> None:
    """names: of models and aliases -> the model's"""
    chains = {}
    for key in FALLBACKS:
        where, value = _ruling(sections, key, missed)
        chains[key] = _chains(where, value, names, missed)
    where, value = _ruling(sections, "default_fallbacks", missed)
    if value:
        chains["fallbacks"]["*"] = _chain(where, value, names, missed)
    for name, model in models.items():
        found = {}
        for key, reasons in FALLBACKS.items():
            by_model = chains[key] or chains["fallbacks"]  # LiteLLM's `fallbacks` are for every error that has no list of its own
            chain = [other for other in by_model.get(name, by_model.get("*", [])) if other != name]
            found.update({reason: chain[:MAX_FALLBACKS] for reason in reasons if chain})
        if found:
            model["fallbacks"] = found


def _ruling(sections: Mapping[str, Raw], key: str, missed: Missed) -> tuple[str, object]:
    """Path and value of the first section that has the key; None where none has it."""
    places = [(f"{name}.{key}", section.pop(key)) for name, section in sections.items() if key in section]
    missed.extend(ConfigError(path, "is not read", f"{places[0][0]} wins.") for path, _ in places[1:])
    return places[0] if places else ("", None)


def _chains(where: str, value: object, names: Mapping[str, str], missed: Missed) -> dict[str, list[str]]:
    """By model; `*`: of all others."""
    chains: dict[str, list[str]] = {}
    for index, item in enumerate(value if isinstance(value, list) else [value] if value else []):
        path = f"{where}[{index}]"
        if not isinstance(item, dict):
            missed.append(ConfigError(path, "is no mapping of a model to a list of models"))
            continue
        for name, targets in item.items():
            if name == "*" or names.get(name) == name:
                chains[name] = _chain(joined(path, name), targets, names, missed)
            else:
                missed.append(ConfigError(joined(path, name), "is not the name of a model that is imported"))
    return chains


def _chain(where: str, targets: object, names: Mapping[str, str], missed: Missed) -> list[str]:
    listed = targets if isinstance(targets, list) else [targets]
    found = [names.get(each) if isinstance(each, str) else None for each in listed]
    if None in found:
        missed.append(ConfigError(where, f"names {shorten(listed[found.index(None)])}, which is not imported"))
    known = list(dict.fromkeys(name for name in found if name is not None))
    if len(known) > MAX_FALLBACKS:
        missed.append(ConfigError(where, f"names {len(known)} models", f"The first {MAX_FALLBACKS} are taken."))
    return known[: MAX_FALLBACKS + 1]  # one may be the model itself


def _gateway(settings: Raw) -> Raw:
    """The sections `cache` and `store`."""
    params = _section(settings, "cache_params")
    if settings.get("cache") is False:
        del settings["cache"]
        return {}
    if settings.get("cache") is not True or params.get("type", "redis") not in ("local", "redis") or params.get("mode") == "default_off":
        return {}
    del settings["cache"]
    cache: Raw = {"enabled": True}
    if isinstance(ttl := params.get("ttl"), int | float) and 0 < ttl < float("inf"):
        cache["ttl_s"] = params.pop("ttl")
    is_redis, host = params.pop("type", "redis") == "redis", str(params.get("host"))
    address = f"{host}:{params.get('port', 6379)}"
    is_plain = re.fullmatch(r"[\w.-]+:[0-9]{1,5}", address, re.ASCII) and not {"username", "password", "ssl"} & params.keys()
    if not (is_redis and is_plain and is_loopback(host)):
        return {"cache": cache}
    del params["host"]
    params.pop("port", None)
    return {"cache": cache, "store": {"url": f"redis://{address}/0"}}
