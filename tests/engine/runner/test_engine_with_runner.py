"""Tests the real loop, scheduler and runner together against the plain greedy loop: token for token."""

from __future__ import annotations

from collections import defaultdict
from typing import Any

import numpy as np
import pytest
from failpoint_kit import armed, sites
from runner_kit import CONTEXT, VOCAB, DenseLlama, MakeRunner

from headrace.core.ids import RequestId
from headrace.core.model_info import ModelInfo
from headrace.core.request import EngineRequest
from headrace.core.sampling import SamplingParams
from headrace.core.update import FinishReason, Rejected, SequenceUpdate
from headrace.engine.build import assemble
from headrace.engine.config import EngineConfig
from headrace.engine.runner.model_runner import ModelRunner, OverlappedRunner
from headrace.tensor.models.decoder import DecoderModel

pytestmark = pytest.mark.socket

SITES = [
    (kind, name)
    for kind, prefixes in (("plain", ("runner.",)), ("device", ("device.", "runner.apply")))
    for name in sites()
    if name.startswith(prefixes) and name != "runner.prompt_logprobs"
]
Key = tuple[str, int]


def request(name: str, prompt: list[int], **changes: Any) -> EngineRequest:
    params = SamplingParams(**{"temperature": 0.0, "seed": 0, "max_tokens": 10, "ignore_eos": True, **changes})
    return EngineRequest(request_id=RequestId(name), prompt_ids=tuple(prompt), params=params)


class Served:
    """What an engine over the tiny Llama said to each sequence, turned by hand until idle."""

    def __init__(
        self,
        decoder: DecoderModel,
        requests: list[EngineRequest],
        make_runner: MakeRunner,
        *,
        depth: int,
        num_blocks: int,
        static_batching: bool = False,
        **config: Any,
    ) -> None:
        settings = EngineConfig(model="tiny", depth=depth, block_size=4, **{"max_num_seqs": 8, "max_num_batched_tokens": 16, **config})
        runner = make_runner(decoder, num_blocks=num_blocks)
        self.runner = OverlappedRunner(runner) if depth > 1 and isinstance(runner, ModelRunner) else runner
        info = ModelInfo(
            architecture="LlamaForCausalLM", vocab_size=VOCAB, max_model_len=CONTEXT, eos_token_ids=(2,), kv_groups=decoder.kv_groups,
            block_size=4, num_blocks=(num_blocks,), dtype="float32", weight_bytes=1,
        )  # fmt: skip
        self.engine = assemble(settings.checked(), self.runner, info, self.take)
        if static_batching:
            self.engine.scheduler.batch_statically()
        self.tokens: dict[Key, list[int]] = defaultdict(list)
        self.finish: dict[Key, FinishReason] = {}
        for item in requests:
            self.engine.submit(item)

    def take(self, updates: list[SequenceUpdate | Rejected]) -> None:
        for update in updates:
            assert isinstance(update, SequenceUpdate), update
            key = (str(update.request_id), update.index)
            self.tokens[key] += update.token_ids
            if update.finish is not None:
                self.finish[key] = update.finish

    def run(self) -> Served:
        try:
            for _ in range(2000):
                if not self.engine.turn():
                    self.engine.scheduler.check()
                    return self
        finally:
            self.runner.close()
        raise AssertionError("the engine did not come to rest")


def prompts(count: int) -> list[list[int]]:
    rng = np.random.default_rng(3)
    common = rng.integers(3, VOCAB, 13).tolist()
    return [[*common[: int(rng.integers(0, 14))], *rng.integers(3, VOCAB, int(rng.integers(1, 12))).tolist()] for _ in range(count)]


@pytest.mark.parametrize("depth", [1, 2])
@pytest.mark.parametrize(
    ("num_blocks", "config"),
    [
        (128, {}),
        (18, {"max_num_batched_tokens": 9}),
        (128, {"enable_prefix_caching": False, "enable_chunked_prefill": False, "max_num_batched_tokens": 30}),
        (40, {"queue_policy": "fair", "max_num_batched_tokens": 8}),
        (128, {"static_batching": True}),
    ],
    ids=["roomy", "preempting", "reference implementations", "fair", "static"],
)
def test_every_request_gets_the_plain_loops_tokens(
    make_runner: MakeRunner, decoder: DecoderModel, dense: DenseLlama, depth: int, num_blocks: int, config: dict[str, Any]
) -> None:
    given = prompts(8)
    served = Served(
        decoder, [request(f"r{i}", p) for i, p in enumerate(given)], make_runner, depth=depth, num_blocks=num_blocks, **config
    ).run()
    assert dict(served.tokens) == {(f"r{i}", 0): dense.greedy(prompt, 10) for i, prompt in enumerate(given)}
    assert set(served.finish.values()) == {FinishReason.LENGTH}
    assert num_blocks > 18 or served.engine.scheduler.sequences.counters.preemptions > 0


@pytest.mark.parametrize("depth", [1, 2])
def test_seeded_samples_do_not_depend_on_depth_preemption_or_neighbours(make_runner: MakeRunner, decoder: DecoderModel, depth: int) -> None:
    """Three samples per prompt, with penalties: preempted and resumed sequences draw and count what they would have."""
    given = [
        request(f"r{i}", p, n=3, temperature=1.0, top_p=0.9, seed=i, presence_penalty=0.8, repetition_penalty=1.2)
        for i, p in enumerate(prompts(4))
    ]
    alone: dict[Key, list[int]] = {}
    for item in given:
        alone |= Served(decoder, [item], make_runner, depth=1, num_blocks=128).run().tokens
    crowded = Served(decoder, given, make_runner, depth=depth, num_blocks=16, max_num_batched_tokens=10).run()
    assert crowded.engine.scheduler.sequences.counters.preemptions > 0
    assert dict(crowded.tokens) == alone
    assert len({tuple(tokens) for tokens in alone.values()}) == 12, "samples of one prompt differ"


@pytest.mark.parametrize("depth", [1, 2])
@pytest.mark.parametrize(("make_runner", "site"), SITES, indirect=["make_runner"])
def test_a_failing_step_costs_nobody_a_token(
    make_runner: MakeRunner, decoder: DecoderModel, dense: DenseLlama, site: str, depth: int
) -> None:
    given = prompts(3)
    requests = [request(f"r{i}", p, max_tokens=6, frequency_penalty=1e-6) for i, p in enumerate(given)]
    with armed(site, skip=3) as fault:
        served = Served(decoder, requests, make_runner, depth=depth, num_blocks=64).run()
    assert fault.hits == 1
    assert dict(served.tokens) == {(f"r{i}", 0): dense.greedy(prompt, 6) for i, prompt in enumerate(given)}
