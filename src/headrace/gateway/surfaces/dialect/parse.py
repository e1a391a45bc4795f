"""Checks the decoded body of a request, as far as several surfaces share its fields, and makes a request that cannot be wrong.

Nothing here depends on the model.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from difflib import get_close_matches
from functools import cache
from operator import attrgetter
from typing import Any, TypeVar

import msgspec
from msgspec import inspect

from headrace.core.errors import InvalidRequest, RequestTooLarge
from headrace.core.request import PriorityClass
from headrace.core.sampling import FROM_MODEL
from headrace.gateway.access.principal import Principal
from headrace.gateway.cache.control import CacheControl
from headrace.gateway.generation.parsed_request import ParsedRequest
from headrace.gateway.surfaces.dialect.field_table import (
    INNER_PLACES,
    MAX_INERT_CHARS,
    MAX_METADATA,
    MAX_PASSED_BYTES,
    RULES,
    TABLE,
    Inside,
    Treatment,
)
from headrace.gateway.surfaces.dialect.routing_fields import routing_wishes
from headrace.gateway.surfaces.dialect.schemas import SamplingFields, requested_grammar
from headrace.gateway.upstream.generation_request import PASSED_IN_BODY, Conversation, PlainPrompts, RequestedGrammar

T = TypeVar("T", bound=msgspec.Struct)
FieldsT = TypeVar("FieldsT", bound=SamplingFields)

Parsed = tuple[FieldsT, RequestedGrammar | None]

MAX_CACHE_SALT_CHARS = 256

MAX_WHOLE = 2.0**53
"""A float may not hold what was written."""

REQUIRED = "a value (it is required)"
ROLES = ("system", "developer", "user", "assistant", "tool")

AS_GIVEN = (
    "n",
    "presence_penalty",
    "frequency_penalty",
    "seed",
    "min_tokens",
    "ignore_eos",
    "logit_bias",
    "prompt_logprobs",
    "include_stop_str_in_output",
    "skip_special_tokens",
)

_as_given_of, _from_model_of, _passed_of = attrgetter(*AS_GIVEN), attrgetter(*FROM_MODEL), attrgetter(*PASSED_IN_BODY)

_PATH = re.compile(r"(?P<what>.*?)(?: - at (?P<is_key>`key` in )?`\$\.?(?P<path>.*)`)?\Z", re.DOTALL)
_EXPECTED = re.compile(r"Expected (?P<kinds>`[^`]*`)(?:, got .*)?\Z", re.DOTALL)
_KINDS = {
    "int": "an integer",
    "float": "a number",
    "str": "a string",
    "bool": "true or false",
    "array": "a list",
    "object": "an object",
    "null": "null",
}
_ANY_KEY = "[...]"
_MISSING = re.compile(r"Object missing required field `(?P<name>[^`]*)`")
_UNKNOWN = re.compile(r"Object contains unknown field `(?P<name>.*)`", re.DOTALL)


PRIORITIES: Mapping[int | str, PriorityClass] = {member.name.lower(): member for member in PriorityClass} | {
    int(member): member for member in PriorityClass if member
}
"""0, vLLM's default, asks for nothing."""


def error_as_written(error: InvalidRequest, names: Mapping[str, str]) -> InvalidRequest | None:
    """None if the client used the common name. names: common name -> the client's"""
    name = names.get(error.field)
    if name is None:
        return None
    limit, remedy = error.limit, error.remedy
    if error.field not in ("prompt", "grammar"):  # rules use these as plain words, too
        as_field = re.compile(rf"\b{error.field}\b")  # no part of another field's name
        limit, remedy = as_field.sub(name, limit), as_field.sub(name, remedy)
    return type(error)(name, limit, error.given, remedy)


def _priority(given: int | str | None, own: PriorityClass) -> PriorityClass:
    if given is None:
        return own
    if (wanted := PRIORITIES.get(given)) is None:
        raise InvalidRequest("priority", "premium, standard or batch (or 1, 2 for the last two; 0 asks for nothing)", given)
    return wanted


def honoured_fields(given: Mapping[str, object], place: str, ignored: dict[str, None], path: str = "") -> dict[str, object]:
    """Looks into the objects inside it too, except messages. Fields that are null or off are left out.

    place    row in RULES and INNER_PLACES
    ignored  receives the names of accepted fields that change nothing at our engines
    path     of the object in the body, for errors: "messages[3]."

    Raises InvalidRequest.
    """
    rules, inner = RULES[place], INNER_PLACES[place]
    inside = "" if place.startswith("/") else f"{place}."
    kept: dict[str, object] = {}
    kinds = rules["type"].kinds if "type" in rules else ()
    if kinds and (kind := given.get("type")) is not None and kind not in kinds:
        served = " or ".join(f'"{each}"' for each in kinds)
        raise InvalidRequest(f"{path}type", served, kind, "Other kinds of tools are not served.")
    for name, value in given.items():
        rule = rules.get(name)
        if rule is None:
            raise unknown_field(name, [known for known, its in rules.items() if its.treatment is not Treatment.REFUSED], path)
        if value is None:
            continue
        if rule.is_off(value):
            ignored[f"{inside}{name}"] = None
        elif rule.treatment is Treatment.HONOURED:
            kept[name] = honoured_inside(value, inner[name], ignored, f"{path}{name}") if name in inner else value
        elif rule.treatment is Treatment.INERT:
            if not rule.is_any:
                check_inert(f"{path}{name}", value)
            ignored[f"{inside}{name}"] = None
        elif rule.treatment is Treatment.PASSED:
            check_passed(f"{path}{name}", value, is_any=rule.is_any)
            kept[name] = value
            ignored[f"{inside}{name}"] = None
        else:
            raise InvalidRequest(f"{path}{name}", rule.off_words, value, rule.note)
    return kept


def honoured_inside(value: object, place: str, ignored: dict[str, None], path: str) -> object:
    if isinstance(value, dict) and not place.endswith("[]"):
        return honoured_fields(value, place, ignored, f"{path}.")
    if isinstance(value, list) and place.endswith("[]"):
        numbered = enumerate(value)
        return [honoured_fields(item, place, ignored, f"{path}[{n}].") if isinstance(item, dict) else item for n, item in numbered]
    return value  # a wrong type is refused later


def unknown_field(name: str, served: Iterable[str], prefix: str = "") -> InvalidRequest:
    close = get_close_matches(name[:80], list(served), n=1)
    honoured = () if prefix else (rule for rule in TABLE if rule.name == name and rule.treatment is Treatment.HONOURED)
    elsewhere = [place for rule in honoured for place in rule.places if not isinstance(place, Inside)]
    if elsewhere:
        remedy = f"It is a field of {elsewhere[0]}."
    else:
        remedy = f"Did you mean {prefix}{close[0]}?" if close else "GET /openapi.json lists every field."
    return InvalidRequest(f"{prefix}{name[:80]}", "a field this server knows", remedy=remedy)


def check_inert(name: str, value: object) -> None:
    if name != "metadata":
        if not isinstance(value, str) or len(value) > MAX_INERT_CHARS:
            raise InvalidRequest(name, f"a string of at most {MAX_INERT_CHARS} characters", value)
        return
    small = isinstance(value, dict) and len(value) <= MAX_METADATA
    if not small or any(not isinstance(text, str) or len(text) > MAX_INERT_CHARS for pair in value.items() for text in pair):  # type: ignore[attr-defined]
        raise InvalidRequest(name, f"at most {MAX_METADATA} strings of at most {MAX_INERT_CHARS} characters", value)


def check_passed(name: str, value: object, *, is_any: bool) -> None:
    if not is_any:
        check_inert(name, value)
    elif (num_bytes := len(msgspec.json.encode(value))) > MAX_PASSED_BYTES:
        raise RequestTooLarge(name, f"at most {MAX_PASSED_BYTES} bytes of JSON", num_bytes, "It is sent on unchanged: send less.")


def checked(request: FieldsT, body: Mapping[str, object]) -> Parsed[FieldsT]:
    if request.stream_options is not None:
        if not request.stream:
            raise InvalidRequest("stream_options", "stream = true beside it")
        if request.stream_options.continuous_usage_stats and not request.stream_options.include_usage:
            raise InvalidRequest("stream_options.continuous_usage_stats", "include_usage = true beside it", True)
    if request.stream and request.prompt_logprobs is not None:
        raise InvalidRequest("prompt_logprobs", "stream = false beside it", request.prompt_logprobs)
    if len(request.cache_salt) > MAX_CACHE_SALT_CHARS:
        raise InvalidRequest("cache_salt", f"at most {MAX_CACHE_SALT_CHARS} characters", len(request.cache_salt))
    return request, requested_grammar(request, body)


def shared_request(parsed: Parsed[SamplingFields], principal: Principal, prompt: Conversation | PlainPrompts) -> ParsedRequest:
    """Parameters of FROM_MODEL that the client left out stay out, for the model's defaults. Raises InvalidRequest."""
    request, grammar = parsed
    given: dict[str, Any] = dict(zip(AS_GIVEN, _as_given_of(request), strict=True))
    given |= {name: value for name, value in zip(FROM_MODEL, _from_model_of(request), strict=True) if value is not None}
    given["stop"] = (request.stop,) if isinstance(request.stop, str) else tuple(request.stop)
    given["stop_token_ids"] = tuple(request.stop_token_ids)
    model, routing = routing_wishes(request.model, request.models, request.fallbacks, request.provider)
    return ParsedRequest(
        model=model,
        routing=routing,
        prompt=prompt,
        sampling=given,
        is_streaming=request.stream,
        priority=_priority(request.priority, principal.priority),
        grammar=grammar,
        has_priority=request.priority is not None,
        cache_salt=request.cache_salt,
        cache=CacheControl.of(request.cache),
        foreign_fields={name: value for name, value in zip(PASSED_IN_BODY, _passed_of(request), strict=True) if value is not None},
    )


def convert(data: object, kind: type[T], prefix: str = "") -> T:
    """Integers may be written with a point, as 16.0 is."""
    try:
        try:
            return msgspec.convert(data, kind, strict=True, str_keys=True)
        except msgspec.ValidationError as error:
            if "got `float`" not in str(error):
                raise
            data = _with_integers(data, _type_info(kind))
            return msgspec.convert(data, kind, strict=True, str_keys=True)
    except msgspec.ValidationError as error:
        raise _translated(str(error), data, kind, prefix) from None
    except OverflowError:
        raise InvalidRequest(prefix or "body", "numbers of reasonable size") from None


_type_info = cache(inspect.type_info)


def _with_integers(data: object, kind: inspect.Type) -> object:
    kinds = kind.types if isinstance(kind, inspect.UnionType) else (kind,)
    if isinstance(data, float):
        is_whole = data.is_integer() and abs(data) <= MAX_WHOLE
        return int(data) if is_whole and any(isinstance(each, inspect.IntType) for each in kinds) else data
    for each in kinds:
        if isinstance(data, list) and isinstance(each, inspect.ListType):
            return [_with_integers(item, each.item_type) for item in data]
        if isinstance(data, dict) and isinstance(each, inspect.StructType):
            inner = {field.encode_name: field.type for field in each.fields}
            return {name: _with_integers(value, inner[name]) if name in inner else value for name, value in data.items()}
    return data


def _translated(message: str, data: object, kind: type[msgspec.Struct], prefix: str) -> InvalidRequest:
    match = _PATH.match(message)
    what, path = (match["what"], match["path"] or "") if match else (message, "")
    field = ".".join(part for part in (prefix, path) if part)
    if match and match["is_key"]:  # logit_bias is the only map whose keys are no strings
        return InvalidRequest(field, "token ids as keys", _odd_key(_value_at(data, path)))
    if missing := _MISSING.match(what):
        return InvalidRequest(".".join(part for part in (field, missing["name"]) if part), REQUIRED)
    if unknown := _UNKNOWN.match(what):
        return unknown_field(unknown["name"], kind.__struct_fields__, f"{field}." if field else "")
    if path.endswith(_ANY_KEY):  # a map of numbers, logit_bias: say which one is none
        values = _value_at(data, path.removesuffix(_ANY_KEY))
        odd = [key for key, value in values.items() if type(value) not in (int, float)] if isinstance(values, dict) else []
        field, path = (f"{field.removesuffix(_ANY_KEY)}.{odd[0]}", f"{path.removesuffix(_ANY_KEY)}.{odd[0]}") if odd else (field, path)
    return InvalidRequest(field or "body", _limit(what), _value_at(data, path))


def _odd_key(values: object) -> object:
    return next((key for key in values if not re.fullmatch(r"-?[0-9]+", str(key))), None) if isinstance(values, dict) else None


def _limit(what: str) -> str:
    """msgspec's "Expected `int | str`, got `bool`" as a rule in words."""
    if what.startswith("Invalid enum value"):
        return "one of " + ", ".join(ROLES)
    expected = _EXPECTED.match(what)
    if expected is None:
        return what.replace("`", "'")[:1].lower() + what.replace("`", "'")[1:]
    kinds = [_KINDS.get(kind.strip(), kind.strip()) for kind in expected["kinds"].strip("`").split("|")]
    return " or ".join(kinds)


def _value_at(data: object, path: str) -> object:
    """path: names and indices. None, which errors do not show, if it names no single value."""
    for name, index in re.findall(r"([^.\[\]]+)|\[([^\]]*)\]", path):
        if name and isinstance(data, dict):
            data = data.get(name)
        elif index.isdigit() and isinstance(data, list) and int(index) < len(data):
            data = data[int(index)]
        else:
            return None
    return data
