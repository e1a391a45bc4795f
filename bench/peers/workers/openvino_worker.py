"""Answers a worker's questions by OpenVINO GenAI's continuous batching pipeline."""

from __future__ import annotations

from typing import Any

from protocol import Generate, serve


def load(settings: dict[str, Any]) -> Generate:
    import numpy as np
    import openvino  # type: ignore[import-not-found]
    import openvino_genai  # type: ignore[import-not-found]

    scheduler = openvino_genai.SchedulerConfig()
    for name, value in settings["options"].items():
        setattr(scheduler, name, value)
    pipe = openvino_genai.ContinuousBatchingPipeline(settings["model"], scheduler, "CPU", settings["properties"])

    def config(count: int) -> object:
        made = openvino_genai.GenerationConfig()
        made.max_new_tokens, made.ignore_eos, made.do_sample = count, True, False
        return made

    def generate(prompts: list[list[int]], max_tokens: list[int]) -> int:
        tensors = [openvino.Tensor(np.array([ids], dtype=np.int64)) for ids in prompts]
        results = pipe.generate(tensors, [config(count) for count in max_tokens])
        return sum(len(result.m_generation_ids[0]) for result in results)

    return generate


if __name__ == "__main__":  # a peer may start processes that import this file again
    serve(load)
