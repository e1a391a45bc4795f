"""Tests patterns with look-around against the expressions that replace them, with Python's own `re` as the judge."""

from __future__ import annotations

import json
import re

import pytest
from sampled_documents import documents, is_taken

from headrace.core.grammar import Grammar, GrammarKind

pytestmark = pytest.mark.pure

EMAIL = r"^(?!\.)(?!.*\.\.)([A-Za-z0-9_'+\-\.]*)[A-Za-z0-9_+-]@([A-Za-z0-9][A-Za-z0-9\-]*\.)+[A-Za-z]{2,}$"

TEXTS = {
    EMAIL: ["a.b@example.com", ".b@example.com", "a..b@example.com", "a@b.co", "a.@b.co", "a@b"],
    r"^(?!^[-+.]*$)[+-]?0*\d*\.?\d*$": ["1.5", "-", ".", ".5", "-0", "", "+1."],
    r"^(?=.*[a-z])(?=.*[A-Z])(?=.*\d)[a-zA-Z\d]{8,12}$": ["abcABC123", "abcabc123", "aB1", "ABCDEFG1"],
    r"^(?=.{1,5}$)[a-z]+(\.[a-z]+)*$": ["ab.cd", "abc.de", "a"],
    r"^(?!.*-$)[a-z-]+$": ["a-b", "a-", "-"],
    r"^(?!.*[xy])[a-z]*$": ["abc", "axc", "y", ""],
    r"^(?![0-9])\w{1,3}$": ["a1", "1a", "9"],
    r"^(?![^a-z])[a-zA-Z]{1,3}$": ["aB", "Ba"],
    r"^(?!__)[a-z_]+$": ["a_", "__a"],
}


@pytest.mark.parametrize("expression", TEXTS)
def test_the_expressions_take_what_the_given_one_takes(expression: str) -> None:
    grammar = Grammar(GrammarKind.JSON_SCHEMA, json.dumps({"type": "string", "pattern": expression}))
    for text in TEXTS[expression]:
        assert is_taken(grammar, json.dumps(text)) == bool(re.search(expression, text)), text
    for document in documents(grammar, 20):
        assert re.search(expression, json.loads(document)), document
