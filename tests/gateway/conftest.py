"""A real tokenizer with a chat template, and a gateway over in-process replicas."""

from __future__ import annotations

from collections.abc import AsyncIterator
from pathlib import Path

import pytest
import text_kit
from gateway_kit import MODEL, TestBench, open_bench, serving

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


@pytest.fixture(params=["tokens", "foreign"])
async def either(request: pytest.FixtureRequest, text: TextModel) -> AsyncIterator[TestBench]:
    """A bench whose model is answered by our engines, and one whose model a foreign server answers: another gateway, over our engines.

    `replica` is the engine's in both.
    """
    if request.param == "tokens":
        async with open_bench(text) as opened:
            yield opened
        return
    async with open_bench(text) as far, serving(far.gateway) as port:
        models = [{"name": MODEL, "aliases": ["gpt-4o"], "upstreams": [{"url": f"http://127.0.0.1:{port}/v1"}]}]
        async with open_bench(text, models=models) as near:
            near.replicas, near.label = far.replicas, "foreign-0"
            yield near
