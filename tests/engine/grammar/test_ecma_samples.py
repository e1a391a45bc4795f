"""Tests random patterns and schemas: what a compiled grammar allows validates, by an engine of ECMAScript's regular expressions.

A pattern's texts are offered in the other direction, too: the grammar takes those that the engine finds a match in.
"""

from __future__ import annotations

import pytest
from ecma_samples import Tally, patterns, schemas

pytestmark = pytest.mark.pure


def tally(num_patterns: int, num_schemas: int, seed: int) -> Tally:
    found = Tally()
    for number, pattern in enumerate(patterns(num_patterns, seed)):
        found.add({"type": "string", "pattern": pattern, "maxLength": 12}, seed=number)
    for number, schema in enumerate(schemas(num_schemas, seed)):
        found.add(schema, seed=number)
    return found


def check(found: Tally) -> None:
    assert not found.disagreements, found.disagreements[:3]
    assert found.num_compiled > found.num_refused
    assert found.num_judged > 3 * found.num_compiled


def test_what_random_patterns_and_schemas_allow_validates() -> None:
    check(tally(75, 75, seed=1))


@pytest.mark.slow
def test_two_thousand_patterns_and_schemas() -> None:
    found = tally(1_000, 1_000, seed=2)
    print(f"{found.num_refused} refused, {found.num_compiled} compiled, {found.num_judged} judged, {found.num_cut} cut")
    print(f"{found.num_texts} texts offered")
    check(found)
