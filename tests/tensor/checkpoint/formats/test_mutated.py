"""Tests three hundred damaged quantized files: each is refused by a CheckpointError, or was damaged where any value is a weight.

They are read in turn by a backend that makes weights dense and by one that multiplies them as they are stored.
"""

from __future__ import annotations

import json
import random
import resource
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from cpu_families import AVX2
from float_formats_kit import Compressed, Fp8, ModelOpt
from quantized_kit import Awq, Gptq, Pair, load, logits, save_pair

from headrace.core.errors import CheckpointError
from headrace.tensor.backends import load_backend

pytestmark = pytest.mark.pure

STORED: dict[str, Any] = {
    "gptq": Gptq(), "gptq in act-order": Gptq(desc_act=True), "awq": Awq(), "packed": Compressed(symmetric=False), "fp8": Fp8(),
    "nvfp4": ModelOpt(),
}  # fmt: skip
ROUNDS = 7
"""Mutations of each kind and format."""
MAX_GROWTH = 512 << 20
"""Bytes by which the process may grow over all of them."""


@pytest.fixture(scope="module", params=STORED)
def made(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Pair:
    return save_pair(tmp_path_factory.mktemp("made"), "Llama", STORED[request.param])


def header_of(data: bytes) -> tuple[int, dict[str, Any]]:
    length = int.from_bytes(data[:8], "little")
    return length, json.loads(data[8 : 8 + length])


def rewritten(data: bytes, change: Callable[[dict[str, Any]], None]) -> bytes:
    """The file with another header."""
    length, header = header_of(data)
    change(header)
    text = json.dumps(header).encode()
    return len(text).to_bytes(8, "little") + text + data[8 + length :]


def a_byte_of_the_header(draw: random.Random, data: bytes, pair: Pair) -> bytes:
    changed = bytearray(data)
    changed[draw.randrange(8 + header_of(data)[0])] ^= 1 << draw.randrange(8)
    return bytes(changed)


def cut_short(draw: random.Random, data: bytes, pair: Pair) -> bytes:
    return data[: draw.randrange(len(data))]


def a_shape(draw: random.Random, data: bytes, pair: Pair) -> bytes:
    def change(header: dict[str, Any]) -> None:
        name = draw.choice([name for name in header if name.count(".") > 3 and header[name]["shape"]])
        shape = header[name]["shape"]
        header[name]["shape"] = draw.choice([[*shape, 1], [1, *shape], [2**40, *shape[1:]], shape[::-1] if len(set(shape)) > 1 else [3]])

    return rewritten(data, change)


def a_dtype(draw: random.Random, data: bytes, pair: Pair) -> bytes:
    def change(header: dict[str, Any]) -> None:
        name = draw.choice([name for name in header if name.count(".") > 3 and header[name]["dtype"] in ("I32", "F8_E4M3", "U8")])
        header[name]["dtype"] = {"I32": "U32", "F8_E4M3": "F8_E5M2", "U8": "BOOL"}[header[name]["dtype"]]

    return rewritten(data, change)


def offsets_that_overlap(draw: random.Random, data: bytes, pair: Pair) -> bytes:
    def change(header: dict[str, Any]) -> None:
        first, second = draw.sample([name for name in header if name != "__metadata__"], 2)
        header[first]["data_offsets"] = header[second]["data_offsets"]

    return rewritten(data, change)


def a_part_that_is_missing(draw: random.Random, data: bytes, pair: Pair) -> None:
    stem = draw.choice(sorted({name.rpartition(".")[0] for name in pair.dense}))
    names = [name for name in pair.tensors if name.startswith(f"{stem}.") and not name.endswith(("input_scale", "g_idx"))]
    del pair.tensors[draw.choice(names)]


def scales_that_are_no_numbers(draw: random.Random, data: bytes, pair: Pair) -> None:
    name = draw.choice([name for name in pair.tensors if "scale" in name and not name.endswith("input_scale")])
    flat = pair.tensors[name].flatten()
    if flat.dtype == torch.float8_e4m3fn:
        flat.view(torch.uint8)[draw.randrange(len(flat))] = draw.choice((0x7F, 0xFF))
    else:
        flat[draw.randrange(len(flat))] = draw.choice((float("nan"), float("inf"), float("-inf")))
    pair.tensors[name] = flat.view(pair.tensors[name].shape)


def the_configuration(draw: random.Random, data: bytes, pair: Pair) -> None:
    def sections(value: dict[str, Any]) -> list[dict[str, Any]]:
        return [value, *(found for each in value.values() if isinstance(each, dict) for found in sections(each))]

    names = ("group_size", "bits", "num_bits", "weight_block_size", "quant_algo", "format", "version", "quant_method", "checkpoint_format")
    places = [(section, name) for section in sections(pair.section) for name in names if name in section]
    section, name = draw.choice(places)
    section[name] = draw.choice((0, -7, 2**40, 1.5, "many", [], {"a": 1}, True))


KINDS = (
    a_byte_of_the_header, cut_short, a_shape, a_dtype, offsets_that_overlap, a_part_that_is_missing, scales_that_are_no_numbers,
    the_configuration,
)  # fmt: skip
MAY_LOAD = (a_byte_of_the_header, the_configuration)
"""Where something that nothing reads may be what was changed. A model that loads is then the one that was stored."""


@pytest.mark.parametrize("kind", KINDS)
def test_a_damaged_file_is_refused(made: Pair, kind: Callable[..., bytes | None], tmp_path: Path) -> None:
    data = (made.folder / "model.safetensors").read_bytes()
    backends = (load_backend("reference"), load_backend("numba", features=AVX2))
    wanted = [logits(load(made.folder, backend=backend)) for backend in backends]
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    for number in range(ROUNDS):
        draw, folder = random.Random(number), tmp_path / str(number)
        pair = made.copied(folder)
        if (changed := kind(draw, data, pair)) is None:
            pair.write()
        else:
            (folder / "model.safetensors").write_bytes(changed)
        try:
            found = logits(load(folder, backend=backends[number % 2]))
        except CheckpointError:
            shutil.rmtree(folder)
            continue
        assert kind in MAY_LOAD, f"round {number} loads"
        assert torch.equal(found, wanted[number % 2])
    assert (resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before) << 10 < MAX_GROWTH
