"""Tests what quoted rates and fleets become in the planner."""

from __future__ import annotations

import pytest

from headrace.lab.plan.catalogue import Catalogue, read_catalogue
from tools.plan_claims import CLAIMS, findings, rule

pytestmark = pytest.mark.pure


@pytest.fixture(scope="module")
def catalogue() -> Catalogue:
    return read_catalogue()


def test_users_double_the_replicas_and_devices_more_than_double_the_sequences(catalogue: Catalogue) -> None:
    rows = {(each.question, each.said): each for each in rule(catalogue)}
    found = [each.found for each in rows.values()]
    assert int(found[0]) == pytest.approx(270, rel=0.02)
    assert int(found[1]) > 2 * int(found[0])
    assert int(found[2]) == int(found[1]) // 64, "of 128K tokens, as long as 64 of 2K"
    assert found[3:] == ["8 x 4 = 32 H100", "16 x 4 = 64 H100", "80 + 30 = 110 A100", "108 + 29 = 137 A100"]


def test_a_claim_holds_where_both_ways_of_counting_reach_it(catalogue: Catalogue) -> None:
    found = list(findings(catalogue))
    assert {each.claim for each in found} == set(CLAIMS)
    for each in found:
        assert each.counted < each.decoding
        least = each.claim.least
        assert each.verdict == ("yes" if each.counted >= least else "for decoding alone" if each.decoding >= least else "no")
    verdicts = {(each.claim.text, each.case): each.verdict for each in found}
    per_a100, per_replica = "1,000 output tokens/s per A100", "1,000 tokens/s and more, 70B"
    assert verdicts[per_a100, "llama-70b on a100, TP 4 and TP 8, 700 tokens of context"] == "for decoding alone"
    assert verdicts[per_a100, "llama-70b on a100, TP 4 and TP 8, 2,048 tokens of context"] == "no"
    assert verdicts[per_replica, "llama-70b on h100, TP 4, 2,048 tokens of context"] == "yes"
