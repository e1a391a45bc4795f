"""What engines of several ranks are asked in tests, in little space, and what they answer."""

from __future__ import annotations

import random
from pathlib import Path
from typing import Any

from real_engine import Answers, RealEngine, greedy_request

from headrace.core.request import EngineRequest

SPACE: dict[str, Any] = {"kernels": "reference", "device": "cpu", "max_model_len": 200, "load_format": "dummy", "seed": 3}
CROWDED: dict[str, Any] = {"num_kv_blocks": 60, "max_num_batched_tokens": 24}
"""So few blocks that sequences are preempted."""


def requests() -> list[EngineRequest]:
    """Prompts some of which begin alike; greedy and seeded sampling, several sequences, penalties, all kinds of log-probabilities."""
    draw = random.Random(0)
    common = [draw.randrange(3, 500) for _ in range(40)]
    shapes: list[tuple[int, dict[str, Any]]] = [
        (1, {}),
        (90, {"logprobs": 2}),
        (17, {"temperature": 1.0, "n": 3, "top_p": 0.9, "logprobs": 1}),
        (44, {"presence_penalty": 0.6, "repetition_penalty": 1.2}),
        (41, {"temperature": 0.8, "top_k": 40, "logit_bias": {70: 3.0}}),
        (33, {"temperature": 1.0, "min_p": 0.02}),
        (60, {"prompt_logprobs": 1}),
    ]
    made = []
    for number, (length, shape) in enumerate(shapes):
        prompt = common[: length // 2] + [draw.randrange(3, 500) for _ in range(length - len(common[: length // 2]))]
        made.append(greedy_request(f"r{number}", prompt, **{"seed": number, "max_tokens": 12, **shape}))
    return made


def answers(folder: Path, **config: Any) -> tuple[Answers, int]:
    """And the number of preemptions."""
    with RealEngine(folder, **{**SPACE, **config}) as engine:
        engine.run(*requests())
        assert not engine.ranks.errors
        return engine.answers(), engine.preemptions
