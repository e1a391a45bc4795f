"""The model's matrix products alone, as fast as a library or ours can do them.

Asked like an engine: one pass over all prompts' rows, then one per further token with a row per
prompt. The faster of the two known implementations answers for each number of rows.
"""

from __future__ import annotations

import os
import time
from pathlib import Path
from typing import Any

from protocol import Generate, serve

from bench.peers.shapes import products_of

PROBES = 3


def load(settings: dict[str, Any]) -> Generate:
    from headrace.tensor.openmp import prepare_openmp

    prepare_openmp(os.environ)
    import torch

    torch.set_num_threads(int(settings["threads"]))
    products = [_Products(kind, Path(settings["model"])) for kind in ("ours", "onednn")]
    fastest: dict[tuple[int, int], _Products] = {}

    def one_pass(rows: int, logit_rows: int) -> None:
        shape = (rows, logit_rows)
        if shape not in fastest:
            fastest[shape] = min(products, key=lambda kind: min(kind.seconds(*shape) for _ in range(PROBES)))
        fastest[shape].seconds(*shape)

    def generate(prompts: list[list[int]], max_tokens: list[int]) -> int:
        one_pass(sum(map(len, prompts)), len(prompts))
        for _ in range(max_tokens[0] - 1):
            one_pass(len(prompts), len(prompts))
        return sum(max_tokens)

    return generate


class _Products:
    """Every linear of the model, prepared by one implementation: "ours" or "onednn"."""

    def __init__(self, kind: str, model: Path) -> None:
        import torch

        from headrace.tensor.kernels.cpu import KERNELS
        from headrace.tensor.kernels.linear import OneDnnLinear

        self._dtype = torch.float32 if kind == "ours" else torch.bfloat16
        products = products_of(model)
        weights = (torch.randn(shape).mul_(0.02).bfloat16() for shape in [*products.layer * products.layers, products.head])
        self._linears = [KERNELS.pack_linear(w.float(), None) if kind == "ours" else OneDnnLinear(w, None) for w in weights]

    def seconds(self, rows: int, logit_rows: int) -> float:
        """One pass: all layers over `rows`, the vocabulary over `logit_rows`."""
        import torch

        inputs = {linear.in_features: torch.randn(rows, linear.in_features).to(self._dtype) for linear in self._linears}
        began = time.perf_counter()
        with torch.inference_mode():
            for linear in self._linears[:-1]:
                linear(inputs[linear.in_features])
            head = self._linears[-1]
            head(inputs[head.in_features][:logit_rows])
        return time.perf_counter() - began


if __name__ == "__main__":  # a peer may start processes that import this file again
    serve(load)
