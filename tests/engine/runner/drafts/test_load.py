"""Tests which models may draft for a target, and that their memory is counted."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from runner_kit import CONTEXT, Planner, row_tokens, save_tiny_llama
from tiny_models import save_tiny_model

from headrace.bundled import DEFAULT_MODEL, DRAFT_MODEL, bundled_path
from headrace.core.errors import ConfigError
from headrace.core.sampling import SamplingParams
from headrace.core.speculation import SpeculativeConfig
from headrace.engine.config import EngineConfig
from headrace.engine.runner import loading
from headrace.engine.runner.build import build_runner
from headrace.engine.runner.drafts.load import describe_draft
from headrace.engine.runner.drafts.model import ModelDrafter
from headrace.engine.runner.model_runner import ModelRunner
from headrace.machine.resources import Available
from headrace.tensor.device import CPU
from headrace.tensor.models import describe

pytestmark = pytest.mark.pure


@pytest.fixture
def draft_folder(tmp_path: Path) -> Path:
    return save_tiny_llama(tmp_path / "draft", seed=1)


def change(folder: Path, **fields: Any) -> None:
    file = folder / "config.json"
    file.write_text(json.dumps({**json.loads(file.read_text()), **fields}))


def config(target: Path, draft: Path, **changes: Any) -> EngineConfig:
    given = {"kernels": "reference", "max_num_seqs": 4, "max_num_batched_tokens": 32, **changes}
    return EngineConfig(
        model=str(target), speculative_config=SpeculativeConfig(method="draft_model", model=str(draft)), **given
    ).checked()  # fmt: skip


def built_drafter(runner: object) -> ModelDrafter:
    assert isinstance(runner, ModelRunner)
    assert isinstance(runner._drafter, ModelDrafter)
    return runner._drafter


def test_a_draft_model_is_loaded_warm_and_said(tiny_folder: Path, draft_folder: Path) -> None:
    runner, info = build_runner(config(tiny_folder, draft_folder))
    drafter, decided = built_drafter(runner), "\n".join(info.decided)
    assert [pool.shape for pool in drafter._kv.pools] == [pool.shape for pool in runner.kv.pools]  # type: ignore[union-attr]
    assert not any(layer.values.any() for layer in drafter._kv.layers)
    assert f"draft model: LlamaForCausalLM from {draft_folder}, 85.2 KiB of weights; it drafts within the first {CONTEXT} tokens" in decided
    assert "KV cache of the draft model: the same 25 blocks of 16 tokens x 2 layers, 4.0 KiB each = 100.0 KiB" in decided
    assert "of a draft model) - weights -" in decided
    runner.close()


def test_it_hears_of_the_runners_sequences(tiny_folder: Path, draft_folder: Path) -> None:
    runner, _ = build_runner(config(tiny_folder, draft_folder))
    drafter, planner = built_drafter(runner), Planner(block_size=16)
    planner.start(2, [5, 6, 7])
    row_tokens(runner.submit(planner.plan((2, 0, 3, 1))).result())
    assert len(drafter.draft(np.array([2]), np.array([3]))[0]) == 3
    assert drafter.num_filled.tolist() == [0, 0, 6, 0]
    planner.end(2)
    planner.start(2, [5, 6])
    runner.submit(planner.plan()).result()
    assert drafter.num_filled.tolist() == [0, 0, 0, 0]


def test_a_shorter_draft_model_drafts_within_its_length(tiny_folder: Path, draft_folder: Path) -> None:
    change(draft_folder, max_position_embeddings=8)
    runner, info = build_runner(config(tiny_folder, draft_folder))
    drafter, planner = built_drafter(runner), Planner(block_size=16)
    planner.start(0, [5] * 6)
    row_tokens(runner.submit(planner.plan((0, 0, 6, 1))).result())
    assert len(drafter.draft(np.array([0]), np.array([9]))[0]) == 2
    assert (info.max_model_len, drafter.num_filled[0]) == (CONTEXT, 8)
    assert "it drafts within the first 8 tokens" in "\n".join(info.decided)


def test_another_vocabulary_is_refused_before_weights_are_read(
    tiny_folder: Path, draft_folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(loading, "load_model", lambda *args, **kwargs: pytest.fail("weights were read"))
    change(draft_folder, vocab_size=99)
    with pytest.raises(ConfigError, match=r"speculative_config\.model: vocabulary size of .*draft: 99; of .*: 101\. Use a draft model"):
        build_runner(config(tiny_folder, draft_folder))


def test_other_end_tokens_are_refused(tiny_folder: Path, draft_folder: Path) -> None:
    change(draft_folder, eos_token_id=[2, 5])
    with pytest.raises(ConfigError, match=r"end tokens of .*draft: 2 5; of .*: 2\."):
        build_runner(config(tiny_folder, draft_folder))


def test_another_tokenizer_is_refused_with_both_digests(tiny_folder: Path, draft_folder: Path, tmp_path: Path) -> None:
    target = shutil.copytree(tiny_folder, tmp_path / "target")
    (draft_folder / "tokenizer.json").write_text("{}")
    with pytest.raises(ConfigError, match=r"tokenizer\.json \(SHA-256\) of .*draft: [0-9a-f]{64}; of .*: none\."):
        build_runner(config(target, draft_folder))
    (target / "tokenizer.json").write_text("{}")
    build_runner(config(target, draft_folder))[0].close()


def test_a_target_of_windows_alone_is_refused_and_one_with_some_is_not(tmp_path: Path) -> None:
    mistral, gemma, draft = (save_tiny_model(name, tmp_path / name) for name in ("mistral", "gemma3", "llama"))
    with pytest.raises(ConfigError, match=r"every layer of .*mistral has a window.* Use the method ngram or suffix"):
        describe_draft(config(mistral, draft), describe(mistral))
    described = describe_draft(config(gemma, draft), describe(gemma))
    assert described is not None
    assert [group.window for group in describe(gemma).kv_groups][described.target_group] is None


def test_layers_with_a_window_draft_in_the_blocks_of_full_attention(tmp_path: Path) -> None:
    """gemma3 as its own draft: always right, past the window of 24 too."""
    folder = save_tiny_model("gemma3", tmp_path / "gemma3")
    runner, _ = build_runner(config(folder, folder, load_format="dummy", dtype="float32"))
    drafter, planner, prompt = built_drafter(runner), _TwoGroups(block_size=16), [7, 8, 9, 10] * 12
    planner.start(0, prompt, SamplingParams(temperature=1.0, seed=3, max_tokens=None))
    for _ in range(4):
        planner._take(0)
    known = row_tokens(runner.submit(planner.plan((0, 0, len(prompt), 1))).result())[0]
    drafts = drafter.draft(np.array([0]), np.array([5]))[0].tolist()
    for at in range(5):
        known += row_tokens(runner.submit(planner.plan((0, len(prompt) + at, 1, 1))).result())[0]
    assert drafts == known[1:]
    assert len(set(drafts)) > 1


class _TwoGroups(Planner):
    """The same blocks in both groups of a target."""

    def _freeze(self, rows: Any) -> Any:
        self._tables = [entry for entry in self._tables for _ in range(2)]
        plan = super()._freeze(rows)
        for place in range(1, len(plan.table_groups), 2):
            plan.table_groups[place] = 1
        return plan


def test_headrace_draft_drafts_what_it_answers_by_itself() -> None:
    """With compiled kernels, which both models share, and recorded steps. Half of the drafts are committed as they are."""
    pytest.importorskip("numba")
    tiny, own = (bundled_path(name) for name in (DEFAULT_MODEL, DRAFT_MODEL))
    assert tiny is not None
    assert own is not None
    exact: dict[str, Any] = {"kernels": "numba", "dtype": "float32", "deterministic": True, "num_threads": 1, "num_kv_blocks": 40}
    runner, _ = build_runner(config(tiny, own, **exact))
    drafter, planner, prompt = built_drafter(runner), Planner(block_size=16), list(range(70, 90))
    planner.start(0, prompt)
    for _ in range(5):
        planner._take(0)
    known = [*prompt, *row_tokens(runner.submit(planner.plan((0, 0, len(prompt), 1))).result())[0]]
    for turn in range(8):
        drafts = drafter.draft(np.array([0]), np.array([4]))[0].tolist()
        plain, _ = build_runner(EngineConfig(model=str(own), max_num_seqs=1, max_num_batched_tokens=64, **exact).checked())
        alone = Planner(block_size=16)
        alone.start(0, known)
        says = row_tokens(plain.submit(alone.plan((0, 0, len(known), 1))).result())[0]
        for _ in range(3):
            says += row_tokens(plain.submit(alone.plan((0, len(known) + len(says) - 1, 1, 1))).result())[0]
        assert drafts == says, f"turn {turn}"
        assert isinstance(runner, ModelRunner)
        for token in [*drafts[: turn % 5], 100 + turn]:
            runner._state.commit(np.array([0]), np.array([token]), np.zeros(0, dtype=np.int64))
            known.append(token)


def test_weights_that_do_not_fit_together_are_refused(tiny_folder: Path, draft_folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(CPU, "free_memory", lambda: Available(120_000, "the cgroup's limit"))
    with pytest.raises(ConfigError, match=r"85\.2 KiB of float32 weights and 85\.2 KiB of a draft model's do not fit the 117\.2 KiB"):
        build_runner(config(tiny_folder, draft_folder))


def test_other_methods_load_no_model(tiny_folder: Path) -> None:
    other = EngineConfig(model=str(tiny_folder), speculative_config=SpeculativeConfig(method="ngram"), device="cpu").checked()
    assert describe_draft(other, describe(tiny_folder)) is None
