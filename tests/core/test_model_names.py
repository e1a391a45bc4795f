"""Tests the model name that a folder's name becomes."""

from __future__ import annotations

import pytest

from headrace.core.model_names import MODEL_NAME, name_of_file

pytestmark = pytest.mark.pure


@pytest.mark.parametrize(
    ("file", "name"),
    [
        ("headrace-tiny", "headrace-tiny"),
        ("Qwen2.5-7B@main", "Qwen2.5-7B@main"),
        ("My Model", "My-Model"),
        ("Mod\u00e8le-7B", "Modele-7B"),
        ("Mode\u0300le-7B", "Modele-7B"),
        ("\u6a21\u578b", "model"),
        ("\u6a21\u578b-7B", "7B"),
        ("it's 100% #1", "it-s-100-1"),
        ('"quoted"', "quoted"),
        ("-dash", "dash"),
        (".hidden", "hidden"),
        ("a\nb\tc", "a-b-c"),
        ("weights\udcff", "weights"),
        ("", "model"),
        ("...", "model"),
        ("\u00e9" * 255, "e" * 255),
        ("\u337b" * 255, "model"),
    ],
)
def test_a_folders_name_becomes_a_model_name(file: str, name: str) -> None:
    assert name_of_file(file) == name
    assert MODEL_NAME.fullmatch(name_of_file(file)) is not None
