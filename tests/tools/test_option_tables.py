"""Tests that the tables of keys in docs/config.md are made from the options, and that every key says what people must know of it."""

from __future__ import annotations

import pytest

from headrace.cli.config.load import file_keys
from tools.option_tables import PAGE, PLACE, filled

pytestmark = pytest.mark.pure


def test_tables_of_keys_are_those_of_the_source() -> None:
    text = PAGE.read_text(encoding="utf-8")
    assert PLACE.search(text)
    assert text == filled(text), "make derived"


def test_every_key_says_what_it_is_for_and_whose_it_is() -> None:
    silent = [leaf.path for leaf in file_keys() if not (leaf.option.help and leaf.option.role)]
    assert not silent
