"""Answers a worker's questions by Headrace's offline API."""

from __future__ import annotations

from typing import Any

from protocol import Generate, serve


def load(settings: dict[str, Any]) -> Generate:
    from headrace import LLM, SamplingParams

    llm = LLM(str(settings["model"]), **settings["options"])

    def generate(prompts: list[list[int]], max_tokens: list[int]) -> int:
        params = [SamplingParams(temperature=0.0, max_tokens=count, ignore_eos=True) for count in max_tokens]
        outputs = llm.generate([{"prompt_token_ids": ids} for ids in prompts], params, use_tqdm=False)
        return sum(len(output.outputs[0].token_ids) for output in outputs)

    return generate


if __name__ == "__main__":  # a peer may start processes that import this file again
    serve(load)
