"""A body's fields, sorted by `dialect.field_table`: honoured ones are kept, ones that change nothing are named, the rest is refused."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from difflib import get_close_matches

from headrace.core.errors import InvalidRequest
from headrace.gateway.surfaces.dialect.field_rule import FieldRule, Inside, Place, Surface, Treatment
from headrace.gateway.surfaces.dialect.field_table import MAX_INERT_CHARS, MAX_METADATA, TABLE

RULES: Mapping[Place, Mapping[str, FieldRule]] = {
    place: {rule.name: rule for rule in TABLE if place in rule.places} for place in (*Surface, *Inside)
}


PATHS = {Surface.CHAT: "/v1/chat/completions", Surface.COMPLETIONS: "/v1/completions"}


def honoured_fields(given: Mapping[str, object], place: Place, ignored: dict[str, None], path: str = "") -> dict[str, object]:
    """The honoured fields of an object that are neither null nor off.

    ignored  gets the names of fields that were accepted and change nothing
    path     of the object in the body, for errors: "messages[3]."

    Raises: InvalidRequest for what is unknown or not served.
    """
    rules = RULES[place]
    kept: dict[str, object] = {}
    for name, value in given.items():
        rule = rules.get(name)
        if rule is None:
            raise unknown_field(name, [known for known, its in rules.items() if its.treatment is not Treatment.REFUSED], path)
        if value is None:
            continue
        if rule.is_off(value):
            ignored[_shown(rule, place)] = None
        elif rule.treatment is Treatment.HONOURED:
            kept[name] = value
        elif rule.treatment is Treatment.INERT:
            if not rule.is_any:
                check_inert(f"{path}{name}", value)
            ignored[_shown(rule, place)] = None
        else:
            raise InvalidRequest(f"{path}{name}", rule.off_words, value, rule.note)
    return kept


def _shown(rule: FieldRule, place: Place) -> str:
    return f"{place}.{rule.name}" if isinstance(place, Inside) else rule.name


def unknown_field(name: str, served: Iterable[str], prefix: str = "") -> InvalidRequest:
    """The error of a field that is in no row. served: fields that its object may have; another one would be refused after this one."""
    close = get_close_matches(name[:80], list(served), n=1)
    elsewhere = [place for place in Surface if not prefix and name in RULES[place] and RULES[place][name].treatment is Treatment.HONOURED]
    if elsewhere:
        remedy = f"It is a field of {PATHS[elsewhere[0]]}."
    else:
        remedy = f"Did you mean {prefix}{close[0]}?" if close else "GET /openapi.json lists every field."
    return InvalidRequest(f"{prefix}{name[:80]}", "a field this server knows", remedy=remedy)


def check_inert(name: str, value: object) -> None:
    """Raises InvalidRequest for a value of another form, or a longer one, than an inert field may have."""
    if name != "metadata":
        if not isinstance(value, str) or len(value) > MAX_INERT_CHARS:
            raise InvalidRequest(name, f"a string of at most {MAX_INERT_CHARS} characters", value)
        return
    small = isinstance(value, dict) and len(value) <= MAX_METADATA
    if not small or any(not isinstance(text, str) or len(text) > MAX_INERT_CHARS for pair in value.items() for text in pair):  # type: ignore[attr-defined]
        raise InvalidRequest(name, f"at most {MAX_METADATA} strings of at most {MAX_INERT_CHARS} characters", value)
