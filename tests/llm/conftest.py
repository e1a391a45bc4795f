"""Provides an `LLM` around the real scheduler and loop, with a runner that needs no weights."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import text_kit

from headrace.core.model_info import ModelInfo
from headrace.engine.build import assemble
from headrace.engine.config import EngineConfig
from headrace.engine.loop import Engine, Outbox
from headrace.lab.fake_runner import FakeOptions, FakeRunner, fake_info
from headrace.llm.api import LLM
from headrace.text.folder import TextModel, load_text

MakeLLM = Callable[..., LLM]


@pytest.fixture(scope="session")
def text(tmp_path_factory: pytest.TempPathFactory) -> TextModel:
    return load_text(text_kit.save_byte_level(tmp_path_factory.mktemp("llm") / "model"))


@pytest.fixture
def make_llm(text: TextModel) -> Iterator[MakeLLM]:
    """make_llm(config=, seed=, change_info=, and FakeOptions' fields): an LLM whose KV blocks are counted at the end."""
    made: list[LLM] = []

    def make(
        *,
        config: EngineConfig | None = None,
        seed: int | None = 0,
        change_info: Callable[[ModelInfo], ModelInfo] = lambda info: info,
        **options: object,
    ) -> LLM:
        fake = FakeOptions(vocab_size=text.tokenizer.vocab_size, max_model_len=256, **options)  # type: ignore[arg-type]

        def build(config: EngineConfig, outbox: Outbox) -> Engine:
            return assemble(config, FakeRunner(fake), change_info(fake_info(fake)), outbox)

        llm = LLM.over(build, text, config=config or EngineConfig(model="fake"), seed=seed)
        made.append(llm)
        return llm

    yield make
    for llm in made:
        snapshot = llm.engine.snapshot()
        assert (snapshot.num_running, snapshot.num_waiting, snapshot.kv_blocks_used) == (0, 0, 1), "one pad block is always in use"
        llm.shutdown()


@pytest.fixture
def model_folder(tmp_path: Path) -> Path:
    return text_kit.save_byte_level(tmp_path / "model")
