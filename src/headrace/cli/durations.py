"""Parses durations of command-line flags: 30d, 12h, 90s."""

from __future__ import annotations

import re

from headrace.cli.exits import UsageRefused

UNITS = {"s": 1, "m": 60, "h": 3600, "d": 86_400, "w": 7 * 86_400}


def seconds_of(text: str, flag: str) -> float:
    """Seconds of a duration such as "30d". Raises UsageRefused, which names the flag, for any other text."""
    found = re.fullmatch(r"(\d{1,9}(?:\.\d{1,3})?)([smhdw])", text)
    if found is None:
        raise UsageRefused(f"{flag}: {text!r} is no time. Write a number and s, m, h, d or w: 30d.")
    return float(found[1]) * UNITS[found[2]]
