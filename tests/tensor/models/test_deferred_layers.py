"""Tests which layers may be called while operations are put off: those that say that they run nothing but package kernels, and
their parts.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch
from cpu_families import AVX2
from torch import Tensor

pytest.importorskip("numba")

from headrace.bundled import DEFAULT_MODEL, bundled_path
from headrace.tensor.backends import load_backend
from headrace.tensor.batch import ForwardBatch, GroupBatch, allocate_kv
from headrace.tensor.device import CPU
from headrace.tensor.kernels import Backend
from headrace.tensor.layers import can_be_deferred
from headrace.tensor.layers.mlp import Mlp
from headrace.tensor.models import decoder, load_model
from headrace.tensor.models.decoder import DecoderModel

pytestmark = pytest.mark.pure

NUMBA = load_backend("numba", features=AVX2)


class Halved(Mlp):
    """What torch computes stands between two kernels. It says nothing of itself, so it is not its parent."""

    def __call__(self, x: Tensor, batch: ForwardBatch) -> Tensor:
        return super().__call__(x * 0.5 + x.sign() * 0.125, batch)


class Liar(Halved):
    runs_only_kernels = True


class Adapted:
    """A linear with something added, as an adapter's would be."""

    def __init__(self, linear: Any) -> None:
        self.linear, self.weight_bytes = linear, linear.weight_bytes
        self.in_features, self.out_features = linear.in_features, linear.out_features

    def __call__(self, x: Tensor) -> Tensor:
        return self.linear(x) + x.mean()  # type: ignore[no-any-return]


class WithAdapter(Mlp):
    runs_only_kernels = True

    def __init__(self, *arguments: Any) -> None:
        super().__init__(*arguments)
        self.down = Adapted(self.down)


def load(backend: Backend, mlp: type[Mlp], monkeypatch: pytest.MonkeyPatch) -> DecoderModel:
    folder = bundled_path(DEFAULT_MODEL)
    if folder is None:
        pytest.skip("no bundled model in this checkout")
    with monkeypatch.context() as patch:
        patch.setattr(decoder, "Mlp", mlp)
        return load_model(
            folder, backend=backend, dtype=torch.float32, device=CPU, load_format="auto", seed=0, max_model_len=64
        ).model  # fmt: skip


@torch.inference_mode()
def answers(model: DecoderModel) -> Tensor:
    """Hidden states [5, E] of a prompt of 3 tokens and 2 decode steps of its kind."""
    kv = allocate_kv(model.kv_shapes, model.group_of, (9,), 16, torch.float32, CPU)

    def step(ids: list[int], first: int) -> Tensor:
        positions = torch.arange(first, first + len(ids))
        group = GroupBatch(torch.tensor([[1]], dtype=torch.int32), 16 + positions)
        starts, context = torch.tensor([0, len(ids)], dtype=torch.int32), torch.tensor([first + len(ids)], dtype=torch.int32)
        return model.forward(torch.tensor(ids), ForwardBatch(positions, starts, context, len(ids), (group,)), kv)

    return torch.cat([step([300, 301, 302], 0), step([303], 3), step([304], 4)])


@pytest.mark.parametrize("mlp", [Mlp, Halved, WithAdapter])
def test_layers_give_the_bits_they_give_without_an_executor(mlp: type[Mlp], monkeypatch: pytest.MonkeyPatch) -> None:
    plain = load(Backend(name="plain steps", kernels=NUMBA.kernels, packing=NUMBA.packing), mlp, monkeypatch)
    model = load(NUMBA, mlp, monkeypatch)
    assert torch.equal(answers(model), answers(plain))
    assert [num_tokens for num_tokens, *_ in model._steps._kept] == ([3, 1] if mlp is Mlp else [])
    assert (model.recorded_bytes > 0) == (mlp is Mlp)
    assert plain.recorded_bytes == 0


def test_a_layer_that_says_it_falsely_gives_wrong_results(monkeypatch: pytest.MonkeyPatch) -> None:
    """What would become of every such layer if none had to say anything: no error, only other numbers."""
    plain, model = (load(backend, mlp, monkeypatch) for backend, mlp in ((load_backend("reference"), Halved), (NUMBA, Liar)))
    assert can_be_deferred(model)
    assert not torch.allclose(answers(model), answers(plain), atol=1e-2)


def test_what_says_nothing_is_not_put_off() -> None:
    class Whole:
        runs_only_kernels = True

    class Made(Whole):
        runs_only_kernels = True

        def __init__(self, *parts: object) -> None:
            self.parts = parts

    class Inherited(Made):
        pass

    assert can_be_deferred(Whole())
    assert can_be_deferred(Made(Whole(), Made()))
    assert not can_be_deferred(Inherited())
    assert not can_be_deferred(Made(Whole(), Made(Inherited())))
    assert not can_be_deferred(object())
    assert not can_be_deferred(lambda x: x)
