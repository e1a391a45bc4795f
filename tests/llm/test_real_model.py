"""Tests `LLM` on the real engine: random weights in every run, and a slow test against transformers' own greedy loop."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import text_kit

from headrace import LLM, SamplingParams

pytestmark = pytest.mark.pure

GREEDY = SamplingParams(temperature=0.0, max_tokens=8, ignore_eos=True)
PROMPTS = ["Hello world!", "The quick brown fox jumps over the lazy dog.", "a"]
SMALL = {"dtype": "float32", "kernels": "reference", "num_gpu_blocks_override": 64, "max_num_seqs": 4, "max_num_batched_tokens": 16}
CONFIG = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "vocab_size": 352,
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 256,
    "rms_norm_eps": 1e-5,
    "rope_theta": 10000.0,
    "hidden_act": "silu",
    "tie_word_embeddings": False,
    "torch_dtype": "float32",
    "eos_token_id": 342,
}


@pytest.fixture(scope="module")
def model_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = text_kit.save_byte_level(tmp_path_factory.mktemp("real") / "model")
    text_kit.write_json(folder / "config.json", CONFIG)
    return folder


def dummy(folder: Path, seed: int = 1, **changes: Any) -> LLM:
    options: dict[str, Any] = {**SMALL, "load_format": "dummy", "seed": seed, **changes}
    return LLM(folder, **options)


@pytest.fixture(scope="module")
def llm(model_folder: Path) -> Iterator[LLM]:
    with dummy(model_folder) as llm:
        yield llm


def answers(llm: LLM, params: SamplingParams = GREEDY) -> list[list[int]]:
    return [output.outputs[0].token_ids for output in llm.generate(PROMPTS, params)]


def test_a_batch_answers_as_its_prompts_do_alone(llm: LLM, model_folder: Path) -> None:
    with dummy(model_folder, enable_prefix_caching=False, max_num_seqs=1) as alone:
        assert answers(llm) == answers(alone)


def test_seeded_sampling_is_repeatable_and_the_llms_seed_makes_unseeded_runs_so(llm: LLM, model_folder: Path) -> None:
    sampled = SamplingParams(seed=9, max_tokens=8, ignore_eos=True)
    assert answers(llm, sampled) == answers(llm, sampled)
    runs = []
    for _ in range(2):
        with dummy(model_folder) as each:
            runs.append(answers(each, sampled.with_(seed=None)))
    assert runs[0] == runs[1]
    with dummy(model_folder, seed=2) as other:
        assert answers(other) != answers(llm)


def test_a_greedy_token_is_the_most_probable_one(llm: LLM) -> None:
    (output,) = llm.chat([{"role": "user", "content": "Hello"}], GREEDY.with_(logprobs=3, prompt_logprobs=1))
    (answer,) = output.outputs
    assert answer.logprobs is not None
    assert all(entry[token_id].rank == 1 for token_id, entry in zip(answer.token_ids, answer.logprobs, strict=True))
    assert answer.cumulative_logprob is not None
    assert answer.cumulative_logprob < 0
    assert output.prompt_logprobs is not None
    assert len(output.prompt_logprobs) == len(output.prompt_token_ids)


def test_the_engine_read_the_same_text_files(llm: LLM, model_folder: Path) -> None:
    from headrace.text.folder import load_text

    known = load_text(model_folder).digests
    assert {kind: llm.engine.info.digests[kind] for kind in known} == known


def greedy(model: Any, prompt_ids: list[int], num_tokens: int) -> list[int]:
    """One plain greedy loop in transformers, no cache."""
    import torch

    ids = list(prompt_ids)
    with torch.no_grad():
        for _ in range(num_tokens):
            ids.append(int(model(torch.tensor([ids])).logits[0, -1].argmax()))
    return ids[len(prompt_ids) :]


@pytest.mark.slow
def test_answers_are_those_of_a_plain_greedy_loop(model_folder: Path, tmp_path: Path) -> None:
    import torch
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(0)
    model = LlamaForCausalLM(LlamaConfig(**{**CONFIG, "initializer_range": 0.2})).eval()
    model.save_pretrained(tmp_path / "model")
    options: dict[str, Any] = {**SMALL}
    with LLM(text_kit.save_byte_level(tmp_path / "model"), **options) as llm:
        for output in llm.generate(PROMPTS, GREEDY):
            assert output.outputs[0].token_ids == greedy(model, output.prompt_token_ids, 8)
