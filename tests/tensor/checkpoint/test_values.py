"""Tests weights whose bytes contradict their header: NaN and infinities, 16-bit dtypes called by the other's name."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors.torch import save_file

from headrace.core.errors import CheckpointError
from headrace.tensor.checkpoint.folder import Checkpoint
from headrace.tensor.checkpoint.values import Sample, num_not_finite

pytestmark = pytest.mark.pure

K = "model.layers.0.self_attn.k_proj.weight"
DTYPES = [torch.float32, torch.float16, torch.bfloat16]


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("value", [float("nan"), -float("nan"), float("inf"), -float("inf")])
@pytest.mark.parametrize("name", [K, "model.norm.weight", "model.embed_tokens.weight", "lm_head.weight"])
def test_a_value_that_is_no_number_is_refused_with_its_tensor(folder: Any, dtype: torch.dtype, value: float, name: str) -> None:
    """It loaded, and every answer failed."""
    folder.tensors = {known: tensor.to(dtype) for known, tensor in folder.tensors.items()}
    folder.tensors[name].view(-1)[-1] = value
    folder.write()
    with pytest.raises(CheckpointError, match=f"tensor {name} holds 1 values that are NaN or infinite") as refused:
        folder.load()
    assert refused.value.file == str(folder.weights)
    assert "damaged" in str(refused.value)


@pytest.mark.parametrize("dtype", DTYPES)
@given(bits=st.lists(st.integers(0, 2**32 - 1), max_size=12), repeat=st.sampled_from([1, 20_000]))
@settings(deadline=None)
def test_counting_by_bits_is_counting_by_value(dtype: torch.dtype, bits: list[int], repeat: int) -> None:
    tensor = torch.tensor(bits, dtype=torch.int64).to(torch.int32).repeat(repeat).view(dtype)
    assert num_not_finite(tensor) == int((~torch.isfinite(tensor)).sum())


def bytes_of(tensor: torch.Tensor) -> bytes:
    return tensor.contiguous().view(torch.uint8).numpy().tobytes()


def contradiction(called: str, *tensors: torch.Tensor) -> str | None:
    sample = Sample()
    for tensor in tensors:
        sample.add(called, bytes_of(tensor))
    return sample.contradiction()


def weights(std: float, dtype: torch.dtype, *, seed: int = 0) -> torch.Tensor:
    return (torch.randn(1 << 17, generator=torch.Generator().manual_seed(seed)) * std).to(dtype)


@pytest.mark.parametrize("std", [1e-3, 0.02, 0.3, 1.0])
def test_each_16_bit_dtype_is_known_from_the_other(std: float) -> None:
    half, brain = weights(std, torch.float16), weights(std, torch.bfloat16)
    assert contradiction("F16", half) is None
    assert contradiction("BF16", brain) is None
    assert "bytes of BF16" in str(contradiction("F16", brain))
    if std < 0.5:  # beyond it float16 bytes called bfloat16 are not small enough to be sure
        assert "bytes of F16" in str(contradiction("BF16", half))


def rounded(levels: int, group: int) -> torch.Tensor:
    """Weights that were rounded to few levels per group and written back as floats."""
    whole = weights(0.02, torch.float32).view(-1, group)
    scale = whole.abs().amax(1, keepdim=True) / levels
    return (whole / scale).round() * scale


@pytest.mark.parametrize(("called", "dtype"), [("F16", torch.float16), ("BF16", torch.bfloat16)])
@pytest.mark.parametrize(
    "unusual",
    [
        pytest.param(torch.zeros(1 << 17), id="zeros"),
        pytest.param(torch.ones(1 << 17), id="ones"),
        pytest.param(weights(0.02, torch.float32).sign() * 0.8, id="one bit"),
        pytest.param(rounded(1, 128), id="ternary"),
        pytest.param(rounded(7, 128), id="int4"),
        pytest.param(rounded(127, 128), id="int8"),
        pytest.param(weights(1.0, torch.float32).uniform_(-1, 1), id="uniform"),
        pytest.param(torch.cat([weights(0.02, torch.float32), weights(1e-6, torch.float32)]), id="half of it decayed"),
        pytest.param(weights(0.02, torch.float32) * (weights(1.0, torch.float32, seed=1) > 1), id="pruned"),
        pytest.param(weights(3.0, torch.float32).exp(), id="log-normal"),
    ],
)
def test_unusual_weights_are_no_contradiction(unusual: torch.Tensor, called: str, dtype: torch.dtype) -> None:
    assert contradiction(called, unusual.to(dtype)) is None


def test_few_values_say_nothing() -> None:
    assert contradiction("F16", weights(0.02, torch.bfloat16)[:8000]) is None


def write_model(folder: Any, dtype: torch.dtype, *, called: str, named: str) -> None:
    """A model with matrices large enough to judge, whose header calls its bytes `called` and whose config.json says `named`."""
    sizes = {"vocab_size": 512, "hidden_size": 128, "intermediate_size": 256}
    swapped = {13: 512, 8: 128, 6: 256, 4: 64}
    folder.config |= sizes | {"dtype": named}
    folder.write_config()
    made = {
        name: torch.ones(swapped[tensor.shape[0]], dtype=dtype)
        if tensor.dim() == 1
        else (torch.randn([swapped[n] for n in tensor.shape], generator=torch.Generator().manual_seed(1)) * 0.02).to(dtype)
        for name, tensor in folder.tensors.items()
    }
    save_file(made, folder.weights)
    relabel(folder.weights, called)


def relabel(path: Path, called: str) -> None:
    data = path.read_bytes()
    length = int.from_bytes(data[:8], "little")
    header = json.loads(data[8 : 8 + length])
    for entry in header.values():
        entry["dtype"] = called
    text = json.dumps(header).encode()
    path.write_bytes(len(text).to_bytes(8, "little") + text + data[8 + length :])


@pytest.mark.parametrize("named", ["bfloat16", "float16", "float32"])
@pytest.mark.parametrize(("dtype", "called", "truth"), [(torch.bfloat16, "F16", "BF16"), (torch.float16, "BF16", "F16")])
def test_bytes_called_by_the_other_dtype_are_refused_whatever_config_says(
    folder: Any, dtype: torch.dtype, called: str, truth: str, named: str
) -> None:
    """They loaded, and the model spoke gibberish."""
    write_model(folder, dtype, called=called, named=named)
    with pytest.raises(CheckpointError, match=f"the weights are called {called} and .* as bytes of {truth} do"):
        folder.load()


@pytest.mark.parametrize("named", ["bfloat16", "float16", "float32"])
@pytest.mark.parametrize(("dtype", "called"), [(torch.bfloat16, "BF16"), (torch.float16, "F16"), (torch.float32, "F32")])
def test_a_file_of_another_dtype_than_config_names_loads_converted(folder: Any, dtype: torch.dtype, called: str, named: str) -> None:
    """As transformers does: what config.json names is what is computed with."""
    write_model(folder, dtype, called=called, named=named)
    assert str(folder.load().dtype) == f"torch.{named}"


def test_the_check_reads_no_more_than_the_digest_does(folder: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    write_model(folder, torch.bfloat16, called="F16", named="bfloat16")
    checkpoint = Checkpoint(folder.path)
    monkeypatch.setattr(Checkpoint, "read", lambda *_: pytest.fail("a weight was read"))
    with pytest.raises(CheckpointError, match="called F16"):
        checkpoint.digest()
