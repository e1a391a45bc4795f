"""Answers a worker's questions by the model's matrix products alone (`bench.peers.ceiling`), as if it were an engine."""

from __future__ import annotations

import os
from pathlib import Path
from typing import TYPE_CHECKING, Any

from protocol import serve

if TYPE_CHECKING:
    from bench.peers.ceiling import Ceiling


def load(settings: dict[str, Any]) -> Ceiling:
    from headrace.tensor.host.openmp import prepare_openmp

    prepare_openmp(os.environ)
    from bench.peers.ceiling import Ceiling, kinds_of
    from bench.peers.shapes import products_of
    from headrace.tensor.backends import load_backend
    from headrace.tensor.host.threads import plan_threads

    load_backend("numba").limit_threads(plan_threads(settings["threads"]).num_threads)
    return Ceiling(products_of(Path(settings["model"])), kinds_of(settings["precision"]))


def prepare(ceiling: Ceiling, prompts: list[list[int]], max_tokens: list[int]) -> None:
    ceiling.prepare(prompts, max_tokens)


if __name__ == "__main__":  # a peer may start processes that import this file again
    serve(load, prepare)
