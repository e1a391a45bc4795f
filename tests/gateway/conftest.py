"""A real tokenizer with a chat template, and a gateway over in-process replicas."""

from __future__ import annotations

from collections.abc import AsyncIterator
from pathlib import Path

import pytest
import text_kit
from gateway_kit import TestBench, open_bench

from headrace.text.folder import TextModel, load_text


@pytest.fixture(scope="session")
def text_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return text_kit.save_byte_level(tmp_path_factory.mktemp("gateway") / "model")


@pytest.fixture(scope="session")
def text(text_folder: Path) -> TextModel:
    model = load_text(text_folder)
    model.template.compile()
    return model


@pytest.fixture
async def bench(text: TextModel) -> AsyncIterator[TestBench]:
    async with open_bench(text) as opened:
        yield opened
