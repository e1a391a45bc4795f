"""Tests that a greedy answer in float32 is that of one plain loop in transformers, token for token, whatever the engine does to be fast.

In this process, through the real loader, runner, scheduler and loop. The same through `headrace serve` is test_server_tokens.py.
"""

from __future__ import annotations

import itertools
import random
from typing import Any

import pytest
from plain_loop import Checkpoint
from real_engine import ROOMY, Key, RealEngine, greedy_request

from headrace import LLM, SamplingParams
from headrace.core.request import EngineRequest, PriorityClass, TierTerms
from headrace.core.update import FinishReason

pytestmark = pytest.mark.pure

COUNT = 12
TRAINED_SLOWLY = [pytest.param("random", id="random"), pytest.param("trained", id="trained", marks=pytest.mark.slow)]
MODES: dict[str, dict[str, Any]] = {
    "batched": {},
    "one at a time": {"max_num_seqs": 1},
    "chunks of 7": {"max_num_batched_tokens": 7, "max_num_seqs": 5},
    "chunks of 13": {"max_num_batched_tokens": 13},
    "whole prefills": {"enable_chunked_prefill": False, "max_num_batched_tokens": 128},
    "no prefix cache": {"enable_prefix_caching": False, "max_num_batched_tokens": 31},
    "static batches": {"static_batching": True, "max_num_seqs": 3},
    "blocks of one token": {"block_size": 1, "num_kv_blocks": 1200},
    "blocks of 16 tokens": {"block_size": 16, "num_kv_blocks": 100},
    "reference kernels": {"kernels": "reference"},
    "fcfs": {"queue_policy": "fcfs", "max_num_seqs": 3, "max_num_batched_tokens": 11},
    "priority": {"queue_policy": "priority", "max_num_seqs": 3, "max_num_batched_tokens": 11},
    "sjf": {"queue_policy": "sjf", "max_num_seqs": 3, "max_num_batched_tokens": 11},
    "fair": {"queue_policy": "fair", "max_num_seqs": 3, "max_num_batched_tokens": 11},
}


STORMS: tuple[dict[str, Any], ...] = (
    {"depth": 1, "queue_policy": "fair", "max_num_batched_tokens": 33, "max_num_seqs": 9, "block_size": 4},
    {"depth": 2, "queue_policy": "sjf", "max_num_batched_tokens": 15, "max_num_seqs": 5, "block_size": 3},
    {"depth": 2, "queue_policy": "priority", "max_num_batched_tokens": 19, "max_num_seqs": 9, "block_size": 8},
)


OVERLAPPED_ALWAYS = ("batched", "chunks of 7", "no prefix cache", "fair")


def overlapped(mode: str) -> Any:
    return pytest.param(mode, 2, marks=() if mode in OVERLAPPED_ALWAYS else pytest.mark.slow)


def longest_of(checkpoint: Checkpoint) -> int:
    return max(len(prompt) for prompt in checkpoint.prompts) + COUNT + 2


def requests_of(checkpoint: Checkpoint, **changes: Any) -> list[EngineRequest]:
    return [
        greedy_request(
            f"r{number}",
            prompt,
            **{
                "max_tokens": COUNT,
                "tenant": f"tenant-{number % 3}",
                "tier": TierTerms(name=f"tier-{number % 2}", weight=1.0 + number % 2),
                "priority": PriorityClass(number % 3),
                **changes,
            },
        )
        for number, prompt in enumerate(checkpoint.prompts)
    ]


def expected(checkpoint: Checkpoint, count: int = COUNT, n: int = 1) -> dict[Key, list[int]]:
    answers = [checkpoint.plain.greedy(prompt, count) for prompt in checkpoint.prompts]
    return {(f"r{number}", index): answer for number, answer in enumerate(answers) for index in range(n)}


@pytest.mark.parametrize("checkpoint", TRAINED_SLOWLY, indirect=True)
@pytest.mark.parametrize(("mode", "depth"), [*((mode, 1) for mode in MODES), *(overlapped(mode) for mode in MODES)])
def test_every_mode_gives_the_plain_loops_tokens(checkpoint: Checkpoint, mode: str, depth: int) -> None:
    with RealEngine(checkpoint.folder, depth=depth, **MODES[mode]) as engine:
        engine.run(*requests_of(checkpoint))
        assert dict(engine.tokens) == expected(checkpoint)
        assert set(engine.finish.values()) == {FinishReason.LENGTH}


@pytest.mark.parametrize("checkpoint", TRAINED_SLOWLY, indirect=True)
@pytest.mark.parametrize("depth", [1, 2])
def test_prefix_hits_change_nothing(checkpoint: Checkpoint, depth: int) -> None:
    with RealEngine(checkpoint.folder, depth=depth, num_kv_blocks=1000) as engine:
        for _ in range(2):
            engine.tokens.clear()
            engine.finish.clear()
            engine.run(*requests_of(checkpoint))
            assert dict(engine.tokens) == expected(checkpoint)
        block_size = engine.engine.info.block_size
        for number, prompt in enumerate(checkpoint.prompts):
            assert engine.cached[f"r{number}"] == (len(prompt) - 1) // block_size * block_size, (
                "the second time, every whole block is a hit"
            )


@pytest.mark.parametrize("checkpoint", TRAINED_SLOWLY, indirect=True)
@pytest.mark.parametrize("depth", [1, 2])
@pytest.mark.parametrize("config", [{"max_num_batched_tokens": 9}, {"enable_prefix_caching": False}], ids=["chunked", "uncached"])
def test_preempted_sequences_resume_without_losing_tokens(checkpoint: Checkpoint, depth: int, config: dict[str, Any]) -> None:
    longest = longest_of(checkpoint)
    with RealEngine(checkpoint.folder, depth=depth, num_kv_blocks=longest // 4 + 5, max_model_len=longest, **config) as engine:
        engine.run(*requests_of(checkpoint))
        assert engine.preemptions > 0
        assert dict(engine.tokens) == expected(checkpoint)


@pytest.mark.parametrize("checkpoint", TRAINED_SLOWLY, indirect=True)
@pytest.mark.parametrize("depth", [1, 2])
def test_cancelled_neighbours_leave_no_trace(checkpoint: Checkpoint, depth: int) -> None:
    """Every second request is cancelled, each at another moment: waiting, in its prefill, decoding."""
    requests = requests_of(checkpoint)
    doomed = requests[1::2]

    def cancel(turn: int) -> None:
        for number, request in enumerate(doomed):
            if turn == 1 + 4 * number:
                engine.engine.cancel(request.request_id)

    with RealEngine(checkpoint.folder, depth=depth, max_num_seqs=6, max_num_batched_tokens=17) as engine:
        engine.run(*requests, each_turn=cancel)
        whole = expected(checkpoint)
        for request in requests:
            key = (str(request.request_id), 0)
            answer = engine.tokens.get(key, [])
            if request in doomed:
                assert answer == whole[key][: len(answer)]
            else:
                assert answer == whole[key]
        assert FinishReason.CANCELLED in engine.finish.values()


@pytest.mark.parametrize("checkpoint", TRAINED_SLOWLY, indirect=True)
@pytest.mark.parametrize("depth", [1, 2])
@pytest.mark.parametrize("num_kv_blocks", [600, 40], ids=["roomy", "tight"])
def test_several_answers_to_one_prompt_are_the_same_greedy_one(checkpoint: Checkpoint, depth: int, num_kv_blocks: int) -> None:
    """The prompt's blocks are shared and its last, partial one is copied on the first write of each fork."""
    with RealEngine(checkpoint.folder, depth=depth, num_kv_blocks=num_kv_blocks, max_model_len=70) as engine:
        engine.run(*requests_of(checkpoint, n=3))
        assert dict(engine.tokens) == expected(checkpoint, n=3)
        assert num_kv_blocks > 40 or engine.preemptions > 0


@pytest.mark.parametrize("checkpoint", TRAINED_SLOWLY, indirect=True)
def test_end_tokens_and_stop_token_ids_end_an_answer_where_the_plain_loop_has_them(checkpoint: Checkpoint) -> None:
    whole = expected(checkpoint)
    stops = {name: answer[COUNT // 2] for (name, _), answer in whole.items()}
    requests = [
        greedy_request(f"r{number}", prompt, max_tokens=COUNT, ignore_eos=False, stop_token_ids=(stops[f"r{number}"],))
        for number, prompt in enumerate(checkpoint.prompts)
    ]
    ends = set(checkpoint.plain.eos_token_ids)
    with RealEngine(checkpoint.folder) as engine:
        engine.run(*requests)
        for key, answer in whole.items():
            last = next(position for position, token_id in enumerate(answer) if token_id in ends | {stops[key[0]]})
            assert engine.tokens[key] == answer[: last + 1]
        assert set(engine.finish.values()) == {FinishReason.STOP}


@pytest.mark.parametrize("checkpoint", TRAINED_SLOWLY, indirect=True)
def test_stop_strings_cut_the_plain_loops_text(checkpoint: Checkpoint) -> None:
    """Stop strings that lie across token borders: the last character of one token and the first of the next."""
    plain = checkpoint.plain
    params, wanted = [], []
    for prompt in checkpoint.prompts:
        answer = plain.greedy(prompt, COUNT)
        text, stop = plain.text(answer), _across_a_border(checkpoint, answer)
        cut = text.find(stop)
        last = next(end for end in range(1, COUNT + 1) if stop in plain.text(answer[:end]))
        params.append(SamplingParams(temperature=0.0, max_tokens=COUNT, ignore_eos=True, stop=(stop,)))
        wanted.append((text[:cut], answer[:last], "stop", stop))
    options: dict[str, Any] = {"dtype": "float32", "kernels": ROOMY["kernels"], "num_threads": 1, "num_gpu_blocks_override": 100}
    with LLM(checkpoint.folder, **options) as llm:
        outputs = llm.generate([{"prompt_token_ids": list(prompt)} for prompt in checkpoint.prompts], params, use_tqdm=False)
        got = [(o.outputs[0].text, o.outputs[0].token_ids, o.outputs[0].finish_reason, o.outputs[0].stop_reason) for o in outputs]
    assert got == wanted


def _across_a_border(checkpoint: Checkpoint, answer: list[int]) -> str:
    """A stop string from the middle of an answer: whole characters only, spanning two tokens where the answer has such a place."""
    texts = [checkpoint.plain.text([token_id]) for token_id in answer]
    pairs = [(a, b) for a, b in itertools.pairwise(texts[4:]) if a.isascii() and b.isascii() and a and b]
    found = next(((a, b) for a, b in pairs if (a + b).isprintable()), pairs[0])
    return found[0][-1] + found[1][0]


@pytest.mark.parametrize("seed", range(3))
@pytest.mark.parametrize("checkpoint", ["random", "trained"], indirect=True)
def test_everything_at_once(checkpoint: Checkpoint, seed: int) -> None:
    """Sixty requests at random moments with random lengths, n, policies and cancellations, in too few blocks and odd chunks."""
    draw = random.Random(seed)
    config = STORMS[seed]
    num_kv_blocks = longest_of(checkpoint) // config["block_size"] + 2  # the longest fits, and hardly anything beside it
    arrivals: dict[int, list[EngineRequest]] = {}
    leaving: dict[int, list[EngineRequest]] = {}
    prompts: dict[str, tuple[int, ...]] = {}
    for number in range(60):
        prompt = draw.choice(checkpoint.prompts)
        name, turn = f"q{number}", draw.randrange(120)
        prompts[name] = prompt
        tenant, priority = f"t{draw.randrange(4)}", PriorityClass(draw.randrange(3))
        request = greedy_request(
            name, prompt, max_tokens=draw.randint(1, COUNT), n=draw.choice([1, 1, 1, 2]), tenant=tenant, priority=priority
        )
        arrivals.setdefault(turn, []).append(request)
        if draw.random() < 0.3:
            leaving.setdefault(turn + draw.randrange(1, 25), []).append(request)
    with RealEngine(checkpoint.folder, num_kv_blocks=num_kv_blocks, max_model_len=longest_of(checkpoint), **config) as engine:
        for turn in range(150):
            engine.submit(*arrivals.get(turn, ()))
            for request in leaving.get(turn, ()):
                engine.engine.cancel(request.request_id)
            engine.engine.turn()
        engine.run()
        assert engine.preemptions > 0
        assert not engine.refused
        ended = engine.finish
        for (name, _), answer in engine.tokens.items():
            assert answer == checkpoint.plain.greedy(prompts[name], COUNT)[: len(answer)]
        for requests in arrivals.values():
            for request in requests:
                for index in range(request.params.n):
                    key = (str(request.request_id), index)
                    if ended[key] is FinishReason.LENGTH:
                        assert len(engine.tokens[key]) == request.params.max_tokens
                    else:
                        assert ended[key] is FinishReason.CANCELLED
        assert {FinishReason.LENGTH, FinishReason.CANCELLED} == set(ended.values())
