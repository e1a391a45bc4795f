"""Tests the option `deterministic`, from the configuration to the bits: tokens and log-probabilities depend on the request alone.

Every architecture runs over random weights on every path of this CPU: alone with nothing clever, which is the oracle, and then in every
kind of company. Requests with a grammar: `test_masked_sequences`. Random mixtures of everything: `test_random_requests`.
"""

from __future__ import annotations

import random
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import pytest
from real_engine import Answers, RealEngine, greedy_request, resumed_anywhere
from tiny_models import MODELS, VOCAB, save_tiny_model
from torch import Tensor

pytest.importorskip("numba")

from headrace import LLM, SamplingParams
from headrace.bundled import bundled_path
from headrace.core.errors import ConfigError
from headrace.core.ids import RequestId
from headrace.core.request import EngineRequest
from headrace.tensor.checkpoint.random_weights import RandomWeights
from headrace.tensor.models import ARCHITECTURES

pytestmark = pytest.mark.pure

PATHS: dict[str, dict[str, str]] = {
    "float32": {"dtype": "float32"},
    "bfloat16": {"dtype": "bfloat16"},
    "int8": {"dtype": "float32", "quantization": "int8"},
    "int4": {"dtype": "float32", "quantization": "int4"},
    "int8 over bfloat16 rows": {"dtype": "bfloat16", "quantization": "int8"},
    "float32 with int8 KV": {"dtype": "float32", "kv_cache_dtype": "int8"},
    "float32 with bfloat16 KV": {"dtype": "float32", "kv_cache_dtype": "bfloat16"},
    "bfloat16 with int8 KV": {"dtype": "bfloat16", "kv_cache_dtype": "int8"},
    "float32 of bfloat16 weights": {"dtype": "float32"},
}
"""What kernels there are: products by dtype, and attention by the dtypes of query and cache."""
SPACE: dict[str, Any] = {
    "deterministic": True, "load_format": "dummy", "block_size": 4, "num_kv_blocks": 900, "max_num_seqs": 16, "max_num_batched_tokens": 256,
}  # fmt: skip
ALONE: dict[str, Any] = {"max_num_seqs": 1, "enable_prefix_caching": False, "max_num_batched_tokens": 2048}
PREEMPTED = ("preempted", "all at once")
"""Schedules over few blocks: more sequences start than can come to their end together."""
SCHEDULES: dict[str, dict[str, Any]] = {
    "batched": {"enable_prefix_caching": False},
    "in whole prompts": {"enable_chunked_prefill": False, "max_num_batched_tokens": 2048},
    "in chunks": {"max_num_batched_tokens": 23, "max_num_seqs": 5},
    "preempted": {"max_num_batched_tokens": 61},
    "overlapped": {"depth": 2},
    "two threads": {"num_threads": 2},
    "alone on two threads": {**ALONE, "num_threads": 2},
    "all at once": {"depth": 2, "num_threads": 2, "max_num_batched_tokens": 61},
}
read_weight = RandomWeights.read
QUICK = {*zip(MODELS, PATHS, strict=True)}
"""Every architecture on one path, and every path with one architecture; all pairs are slow."""
CASES = [
    pytest.param((model, path), id=f"{model}-{path}", marks=() if (model, path) in QUICK else pytest.mark.slow)
    for model in MODELS
    for path in PATHS
]


def requests() -> list[EngineRequest]:
    """Prompts from one token to three splits of attention's keys, some of which begin alike; every kind of sampling."""
    draw = random.Random(0)
    common = [draw.randrange(3, VOCAB) for _ in range(64)]
    shapes: list[tuple[int, dict[str, Any]]] = [
        (1, {"temperature": 0.0}),
        (1100, {}),
        (17, {"n": 2, "top_p": 0.9}),
        (90, {"presence_penalty": 0.6, "repetition_penalty": 1.2}),
        (91, {"top_k": 40, "logit_bias": {70: 3.0}, "logprobs": None}),
        (33, {"min_p": 0.02, "min_tokens": 5, "ignore_eos": False}),
        (140, {"temperature": 1.7, "prompt_logprobs": 1}),
    ]
    made = []
    for number, (length, shape) in enumerate(shapes):
        prompt = common[: length // 2] + [draw.randrange(3, VOCAB) for _ in range(length - len(common[: length // 2]))]
        params = {"temperature": 1.0, "seed": number, "max_tokens": 16, "logprobs": 3, **shape}
        made.append(greedy_request(f"r{number}", prompt, **params))
    return made


@dataclass(frozen=True)
class Case:
    """A model on one path.

    alone       each request on its own, prompts whole, one step after the other
    few_blocks  the longest request takes nearly all of them; where all layers have a window, about four requests do
    """

    folder: Path
    path: dict[str, str]
    alone: Answers
    few_blocks: int

    @classmethod
    def of(cls, folder: Path, path: dict[str, str]) -> Case:
        with RealEngine(folder, **{**SPACE, **path, **ALONE}) as engine:
            for request in requests():
                engine.run(request)
            has_full_layers = any(group.window is None for group in engine.engine.info.kv_groups)
            return cls(folder, path, engine.answers(), 290 if has_full_layers else 64)

    def engine(self, schedule: str = "", **config: Any) -> RealEngine:
        few = {"num_kv_blocks": self.few_blocks} if schedule in PREEMPTED else {}
        return RealEngine(self.folder, **{**SPACE, **self.path, **SCHEDULES.get(schedule, {}), **few, **config})


@pytest.fixture(scope="module", params=CASES)
def case(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Case]:
    model, path = request.param
    with pytest.MonkeyPatch.context() as patch:
        if path == "float32 of bfloat16 weights":
            patch.setattr(RandomWeights, "read", read_rounded)
        yield Case.of(save_tiny_model(model, tmp_path_factory.mktemp("model")), PATHS[path])


def read_rounded(self: RandomWeights, *arguments: Any) -> Tensor:
    """Weights that are exact in bfloat16, as a converted checkpoint's: kernels store these in half the bytes."""
    return read_weight(self, *arguments).bfloat16().float()


def test_every_architecture_is_among_the_models() -> None:
    assert {model["architectures"][0] for model in MODELS.values()} == set(ARCHITECTURES)


@pytest.mark.socket
def test_in_the_worst_company_and_resumed_the_bits_are_the_same(case: Case) -> None:
    parts, expected = resumed_anywhere(requests(), case.alone, random.Random(1))
    with case.engine("all at once") as engine:
        engine.run(*requests())
        engine.run(*parts)
        assert engine.answers() == case.alone | expected
        assert engine.preemptions > 0


@pytest.mark.slow
@pytest.mark.parametrize("schedule", SCHEDULES)
def test_a_schedule_changes_no_bit(case: Case, schedule: str) -> None:
    with case.engine(schedule) as engine:
        engine.run(*requests())
        assert engine.answers() == case.alone
        assert (engine.preemptions > 0) == (schedule in PREEMPTED)


@pytest.mark.slow
def test_a_prefix_hit_changes_no_bit(case: Case) -> None:
    with case.engine() as engine:
        engine.run(*[replace(request, request_id=RequestId(f"first {request.request_id}")) for request in requests()])
        engine.run(*requests())
        assert {key: answer for key, answer in engine.answers().items() if key in case.alone} == case.alone
        assert sum(engine.cached[str(request.request_id)] > 0 for request in requests()) >= 4


@pytest.mark.slow
@pytest.mark.parametrize("depth", [1, 2])
def test_a_resume_changes_no_bit(case: Case, depth: int) -> None:
    parts, expected = resumed_anywhere(requests(), case.alone, random.Random(depth))
    with case.engine(depth=depth) as engine:
        engine.run(*parts)
        assert engine.answers() == expected


@pytest.mark.parametrize(
    ("config", "what"),
    [({"head_dim": 20}, "heads of 20 in torch.float32"), ({"intermediate_size": 83}, r"a linear of \[128, 83\]")],
)
def test_shapes_without_a_kernel_are_refused_at_start(tmp_path: Path, config: dict[str, int], what: str) -> None:
    folder = save_tiny_model("qwen3", tmp_path, **config)
    with pytest.raises(ConfigError, match=f"deterministic: .*{what}.* is computed by a library here"):
        RealEngine(folder, **SPACE)
    with RealEngine(folder, **{**SPACE, "deterministic": False}) as engine:
        engine.run(greedy_request("plain", [5, 6, 7]))


def bundled() -> Path:
    folder = bundled_path("headrace-tiny")
    assert folder is not None
    return folder


@pytest.mark.socket
def test_it_reaches_the_engine_from_llm_and_is_said_at_start() -> None:
    with LLM(deterministic=True, num_gpu_blocks_override=64, dtype="float32") as llm:
        assert any("deterministic" in line for line in llm._engine.info.decided)
        alone = llm.generate("One", SamplingParams(max_tokens=8, temperature=0.0, logprobs=1), use_tqdm=False)[0].outputs[0]
        together = llm.generate(["One", "Two", "Three"], SamplingParams(max_tokens=8, temperature=0.0, logprobs=1), use_tqdm=False)
        assert together[0].outputs[0].logprobs == alone.logprobs


def test_kernels_that_cannot_promise_it_are_refused_by_name() -> None:
    with pytest.raises(ConfigError, match=r"deterministic: reference kernels .*numba, which need device cpu"):
        RealEngine(bundled(), deterministic=True, kernels="reference")
