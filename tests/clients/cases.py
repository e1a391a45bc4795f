"""Runs each case of this folder's scripts, and prints how it went as one line of JSON.

The scripts run in an environment of the library alone, so this module imports nothing of ours.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence

MAX_DETAIL_CHARS = 200
ANSWER_TOKENS = 150
MODEL = "headrace-tiny"
QUESTION = "What is the weather in Paris?"

Case = Callable[[], object]


def run(bound: Mapping[str, Case], free: Mapping[str, Case]) -> None:
    """
    bound  must pass: the server holds the model to the form
    free   what comes out depends on how well the model follows the prompt; how they went is recorded
    """
    for cases, is_bound in ((bound, True), (free, False)):
        for name, case in cases.items():
            print(json.dumps({"case": name, "is_bound": is_bound, **_outcome(case)}), flush=True)


def _outcome(case: Case) -> dict[str, object]:
    try:
        shown = repr(case())
    except Exception as error:  # whatever a library raises is its answer
        first = (str(error).strip().splitlines() or [""])[0]
        return {"passed": False, "detail": f"{type(error).__name__}: {first}"[:MAX_DETAIL_CHARS]}
    return {"passed": True, "detail": shown[:MAX_DETAIL_CHARS]}


def same(given: object, expected: object) -> object:
    """`given` where it is what was expected. Raises AssertionError."""
    if given != expected:
        raise AssertionError(f"{given!r} is not {expected!r}")
    return given


def one(items: Sequence[object] | None) -> object:
    """The only item. Raises AssertionError for none or several."""
    if not items or len(items) != 1:
        raise AssertionError(f"{items!r} is not one item")
    return items[0]
