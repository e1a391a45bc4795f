"""Reads from the headers and the errors of a foreign server how long to wait."""

from __future__ import annotations

import re
from collections.abc import Mapping
from datetime import UTC
from email.utils import parsedate_to_datetime

from headrace.gateway.upstream.foreign.values import number_in, number_of

MAX_WAIT_S = 3600.0
"""A server that asks for a longer wait is asked again after this many seconds."""

_PARTS = re.compile(r"(\d+(?:\.\d+)?)(ms|s|m|h|d)")
_SECONDS = {"ms": 0.001, "s": 1.0, "m": 60.0, "h": 3600.0, "d": 86400.0}


_STATED = re.compile(r"(?:again|retry|wait)\D{0,40}?((?:\d{1,9}(?:\.\d{1,9})? ?(?:ms|milli|h|m|s)[a-z]* ?)+)")
_SPOKEN = re.compile(r"(\d+(?:\.\d+)?) ?(ms|milli|h|m|s)")
_SPOKEN_S = {"ms": 0.001, "milli": 0.001, "h": 3600.0, "m": 60.0, "s": 1.0}


def stated_wait_s(words: str) -> float | None:
    """Seconds in a sentence such as "please try again in 1m30.5s" or "retry after 26 seconds", in lower case; None: it states none."""
    if (found := _STATED.search(words)) is None:
        return None
    return _bounded(sum(float(number) * _SPOKEN_S[unit] for number, unit in _SPOKEN.findall(found[1])))


def duration_s(value: object, unit_s: float) -> float | None:
    """Seconds of an error's field: a number of units, or a text such as "34s"; None for anything else."""
    number = number_of(value)
    if number is None:
        return _duration_s(value) or None if isinstance(value, str) else None
    return _bounded(number * unit_s)


def retry_after_s(headers: Mapping[str, str], unix_now: float) -> float | None:
    """Seconds to wait by an answer's `retry-after-ms`, or `Retry-After` as seconds or a date; None: it has neither."""
    if (given := headers.get("retry-after-ms", "")) and (milliseconds := number_in(given)) >= 0:
        return _bounded(milliseconds / 1000)
    given = headers.get("retry-after", "")
    if (seconds := number_in(given)) >= 0:
        return _bounded(seconds)
    try:
        when = parsedate_to_datetime(given)
    except (ValueError, OverflowError):
        return None
    return _bounded((when if when.tzinfo else when.replace(tzinfo=UTC)).timestamp() - unix_now)


def exhausted_s(headers: Mapping[str, str]) -> float:
    """Seconds until a provider takes requests again, by headers that count none left; 0: some are left, or there are no such headers.

    The headers are OpenAI's x-ratelimit-remaining-requests and -tokens with their x-ratelimit-reset-*, and the IETF draft's
    ratelimit-remaining.
    """
    wait_s = 0.0
    for remaining, reset in (
        ("x-ratelimit-remaining-requests", "x-ratelimit-reset-requests"),
        ("x-ratelimit-remaining-tokens", "x-ratelimit-reset-tokens"),
        ("ratelimit-remaining", "ratelimit-reset"),
    ):
        if remaining in headers and headers[remaining].strip() == "0":
            wait_s = max(wait_s, _duration_s(headers.get(reset, "")))
    return wait_s


def _duration_s(text: str) -> float:
    """Seconds in "6m0s", "20ms" or "12.5"; 0 for anything else."""
    text = text.strip()
    parts = _PARTS.findall(text)
    if parts and "".join(number + unit for number, unit in parts) == text:
        return _bounded(sum(number_in(number) * _SECONDS[unit] for number, unit in parts))
    return _bounded(max(0.0, number_in(text)))


def _bounded(seconds: float) -> float:
    return min(max(seconds, 0.0), MAX_WAIT_S)
