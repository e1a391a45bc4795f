"""Loads two tokenizers of the kinds that exist, once."""

from __future__ import annotations

from pathlib import Path

import pytest
import text_kit

from headrace.text.folder import TextModel, load_text
from headrace.text.tokenizer import Tokenizer


@pytest.fixture(scope="session")
def byte_level_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return text_kit.save_byte_level(tmp_path_factory.mktemp("text") / "byte-level")


@pytest.fixture(scope="session")
def chat_model(byte_level_folder: Path) -> TextModel:
    return load_text(byte_level_folder)


@pytest.fixture(scope="session")
def byte_level(chat_model: TextModel) -> Tokenizer:
    return chat_model.tokenizer


@pytest.fixture(scope="session")
def metaspace(tmp_path_factory: pytest.TempPathFactory) -> Tokenizer:
    return Tokenizer.load(text_kit.save_metaspace(tmp_path_factory.mktemp("text") / "metaspace"))


@pytest.fixture(scope="session", params=["byte_level", "metaspace"])
def tokenizer(request: pytest.FixtureRequest) -> Tokenizer:
    found = request.getfixturevalue(request.param)
    assert isinstance(found, Tokenizer)
    return found
