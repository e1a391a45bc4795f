"""Tests damaged, lying and hostile weight files: refused with file and reason."""

from __future__ import annotations

import os
import random
import struct
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from headrace.core.errors import CheckpointError
from headrace.tensor.checkpoint.folder import Checkpoint

pytestmark = pytest.mark.pure

Q = "model.layers.0.self_attn.q_proj.weight"


def refusal(folder: Any, **options: Any) -> CheckpointError:
    with pytest.raises(CheckpointError) as caught:
        folder.load(**options)
    return caught.value


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
@given(data=st.data())
@settings(suppress_health_check=[HealthCheck.function_scoped_fixture])
def test_a_region_that_is_read_is_that_of_the_tensor(folder: Any, dtype: torch.dtype, data: st.DataObject) -> None:
    shape = tuple(data.draw(st.lists(st.integers(1, 5), max_size=4)))
    whole = torch.randn(shape).to(dtype)
    folder.tensors = {"before": torch.randn(3), "x": whole, "after": torch.randn(3)}
    folder.write()
    bounds = [sorted(data.draw(st.lists(st.integers(0, size), min_size=2, max_size=2))) for size in shape]
    region = tuple(slice(*pair) for pair in bounds)[: data.draw(st.integers(0, len(shape)))]
    read = Checkpoint(folder.path).read("x", shape, region)
    assert read.dtype == dtype
    assert torch.equal(read, whole[region])


def test_a_file_cut_short_after_its_header_was_read(folder: Any) -> None:
    checkpoint = Checkpoint(folder.path)
    with folder.weights.open("r+b") as stream:
        stream.truncate(folder.weights.stat().st_size - 1)
    last = max(folder.tensors, key=lambda name: checkpoint._headers[folder.weights.name].tensors[name].end)
    with pytest.raises(CheckpointError, match="became shorter") as caught:
        checkpoint.read(last, tuple(folder.tensors[last].shape))
    assert caught.value.file == str(folder.weights)


def test_the_untouched_folder_loads(folder: Any) -> None:
    loaded = folder.load()
    assert loaded.resident_bytes == 4 * sum(t.numel() for t in folder.tensors.values() if t.dim() == 2)


@pytest.mark.parametrize("kept", [0, 7, 8, 100, -1])
def test_truncated_file(folder: Any, kept: int) -> None:
    folder.weights.write_bytes(folder.weights.read_bytes()[:kept])
    error = refusal(folder)
    assert error.file == str(folder.weights)
    assert "damaged" in error.remedy


def test_trailing_bytes(folder: Any) -> None:
    folder.weights.write_bytes(folder.weights.read_bytes() + b"\0")
    assert "the file has" in refusal(folder).reason


@pytest.mark.parametrize("claimed", [0, 1, 2**20, 2**63, 2**64 - 1])
def test_header_length_that_lies(folder: Any, claimed: int) -> None:
    folder.write_header(folder.read_header(), claimed=claimed)
    assert refusal(folder).file == str(folder.weights)


@pytest.mark.parametrize(
    "text",
    [b"", b"[]", b"null", b"{", b'{"a":NaN}', b"\xff\xfe", b"[" * 100_000, b'{"a":' * 50_000,
     b'{"a":1' + b"0" * 10_000 + b"}", b'{"a":1,"a":1}'],
    ids=["empty", "list", "null", "cut", "nan", "not-utf8", "deep-lists", "deep-objects", "giant-integer", "duplicate-key"],
)  # fmt: skip
def test_header_that_is_not_a_plain_object(folder: Any, text: bytes) -> None:
    folder.write_header(None, text=text)
    assert refusal(folder).file == str(folder.weights)


def test_a_header_of_very_many_entries_is_refused_before_it_is_parsed(folder: Any) -> None:
    folder.write_header(None, text=b"{" + b'"x":{},' * 200_000 + b'"y":{}}')
    assert "objects and lists" in refusal(folder).reason


@pytest.mark.parametrize(
    ("field", "value", "said"),
    [
        ("dtype", "F64", "by dtype and shape"),
        ("dtype", "F99", "unknown dtype"),
        ("dtype", 7, "unknown dtype"),
        ("dtype", "I32", "has dtype I32"),
        ("shape", [8, 9], "by dtype and shape"),
        ("shape", [4, 16], "config.json makes it [8, 8]"),
        ("shape", [64], "config.json makes it [8, 8]"),
        ("shape", [8, -8], "positive sizes"),
        ("shape", [2**40, 2**40], "by dtype and shape"),
        ("shape", [0, 8], "positive sizes"),
        ("shape", [1] * 9, "positive sizes"),
        ("shape", [8.0, 8], "positive sizes"),
        ("shape", "88", "positive sizes"),
        ("shape", [True, 64], "positive sizes"),
        ("data_offsets", [0, 256], "overlaps"),
        ("data_offsets", [10**9, 10**9 + 256], "hole"),
        ("data_offsets", [2**63, 2**63 + 256], "byte positions"),
        ("data_offsets", [256, 0], "by data_offsets"),
        ("data_offsets", [-256, 0], "byte positions"),
        ("data_offsets", [0], "byte positions"),
        ("data_offsets", None, "byte positions"),
        ("extra", 1, "an entry holds"),
    ],
)
def test_an_entry_that_lies(folder: Any, edit_header: Callable[..., None], field: str, value: object, said: str) -> None:
    edit_header(Q, field, value)
    error = refusal(folder)
    assert error.file == str(folder.weights)
    assert error.reason.startswith("tensor ")
    assert said in error.reason


def test_missing_tensor(folder: Any) -> None:
    del folder.tensors[Q]
    folder.write()
    assert refusal(folder).reason == f"tensor {Q} is missing"


def test_unknown_tensor_is_refused_but_inert_buffers_are_not(folder: Any) -> None:
    folder.tensors["model.layers.0.self_attn.rotary_emb.inv_freq"] = torch.ones(2)
    folder.write()
    folder.load()
    folder.tensors["model.layers.1.input_layernorm.weight"] = torch.ones(8)
    folder.write()
    assert "model.layers.1.input_layernorm.weight" in refusal(folder).reason


def test_a_bias_the_configuration_does_not_know_is_refused(folder: Any) -> None:
    folder.tensors["model.layers.0.self_attn.q_proj.bias"] = torch.ones(8)
    folder.write()
    assert "q_proj.bias" in refusal(folder).reason


def test_shards_are_read_as_one(folder: Any) -> None:
    whole = folder.load()
    folder.shard(3)
    sharded = folder.load()
    for ours, theirs in zip(whole.model.blocks[0].mlp.linears, sharded.model.blocks[0].mlp.linears, strict=True):
        assert torch.equal(ours.weight, theirs.weight)
    assert torch.equal(whole.model.embedding.whole(), sharded.model.embedding.whole())
    assert whole.model_digest != sharded.model_digest  # other files


def test_missing_shard(folder: Any) -> None:
    file = folder.shard(2)[Q]
    (folder.path / file).unlink()
    error = refusal(folder)
    assert error.file == str(folder.path / file)
    assert error.reason == "no such file"


@pytest.mark.parametrize(
    "name", ["../x.safetensors", "/etc/passwd", "a/b.safetensors", "x.bin", "", "..", ".safetensors", "a\0.safetensors", 7, None]
)
def test_index_naming_something_else_than_a_shard(folder: Any, name: object) -> None:
    weight_map: dict[str, object] = dict(folder.shard(2))
    weight_map[Q] = name
    folder.write_index(weight_map)
    assert refusal(folder).file.endswith("index.json")


def test_index_and_shards_that_disagree(folder: Any) -> None:
    weight_map = folder.shard(2)
    other = next(file for file in weight_map.values() if file != weight_map[Q])
    folder.write_index({**weight_map, Q: other})
    assert "names it" in refusal(folder).reason
    folder.write_index({name: file for name, file in weight_map.items() if name != Q})
    assert "is not named by" in refusal(folder).reason
    folder.write_index({})
    assert "names no tensor" in refusal(folder).reason
    folder.write_index([1])
    assert "must be an object" in refusal(folder).reason


def test_a_tensor_in_two_shards(folder: Any) -> None:
    weight_map = folder.shard(2)
    files = sorted(set(weight_map.values()))
    (folder.path / files[1]).write_bytes((folder.path / files[0]).read_bytes())
    assert "is also in" in refusal(folder).reason


def test_a_link_out_of_the_folder(folder: Any, tmp_path_factory: pytest.TempPathFactory) -> None:
    outside = tmp_path_factory.mktemp("outside") / "model.safetensors"
    folder.weights.rename(outside)
    folder.weights.symlink_to(outside)
    assert "leads out of the folder" in refusal(folder).reason


def test_a_link_that_turns_in_circles(folder: Any) -> None:
    folder.weights.unlink()
    folder.weights.symlink_to("other.safetensors")
    (folder.path / "other.safetensors").symlink_to("model.safetensors")
    refusal(folder)


def test_the_hub_caches_links_are_followed(folder: Any, tmp_path: Path) -> None:
    snapshot, blobs = tmp_path / "models--a--b" / "snapshots" / "0f", tmp_path / "models--a--b" / "blobs"
    snapshot.mkdir(parents=True)
    blobs.mkdir()
    for number, name in enumerate(("config.json", "model.safetensors")):
        (folder.path / name).rename(blobs / str(number))
        (snapshot / name).symlink_to(f"../../blobs/{number}")
    folder.path = snapshot
    folder.load()


def test_a_pipe_in_place_of_a_file_does_not_hang(folder: Any) -> None:
    folder.weights.unlink()
    os.mkfifo(folder.weights)
    assert "not a regular file" in refusal(folder).reason


def test_a_folder_in_place_of_a_file(folder: Any) -> None:
    folder.weights.unlink()
    folder.weights.mkdir()
    refusal(folder)


@pytest.mark.parametrize("name", ["pytorch_model.bin", "consolidated.00.pth", "model.pt", "weights.pkl"])
def test_pickle_formats_are_refused_by_name(folder: Any, name: str) -> None:
    folder.weights.rename(folder.path / name)
    error = refusal(folder)
    assert error.file.endswith(name)
    assert "pickle" in error.reason


def test_no_weights_at_all(folder: Any) -> None:
    folder.weights.unlink()
    assert "neither" in refusal(folder).reason


def mutate(raw: bytes, generator: random.Random) -> bytes:
    """One random defect, mostly in the header: flipped bits, a cut, a repeated or overwritten piece, another length."""
    (length,) = struct.unpack("<Q", raw[:8])
    mutant = bytearray(raw)
    kind = generator.randrange(5)
    where = generator.randrange(8 + length)
    if kind == 0:
        mutant[where] ^= 1 << generator.randrange(8)
    elif kind == 1:
        del mutant[generator.randrange(len(mutant)) :]
    elif kind == 2:
        mutant[where : where + generator.randrange(1, 9)] = b""
    elif kind == 3:
        mutant[where:where] = mutant[where : where + generator.randrange(1, 40)]
    else:
        mutant[where : where + 1] = generator.choice([b"9", b"-", b"[", b"}", b'"', b"\0", b"e9"])
    return bytes(mutant)


def load_mutants(folder: Any, count: int, seed: int) -> int:
    """How many were refused; a mutant that loads must hold the same tensors (a defect in spacing or metadata)."""
    raw, generator, refused = folder.weights.read_bytes(), random.Random(seed), 0
    expected = folder.load().model
    for _ in range(count):
        mutant = mutate(raw, generator)
        folder.weights.write_bytes(mutant)
        try:
            model = folder.load().model
        except CheckpointError:
            refused += 1
        else:
            assert torch.equal(model.embedding.whole(), expected.embedding.whole())
            assert torch.equal(model.head.weight, expected.head.weight)
            assert torch.equal(model.blocks[0].attention.qkv.weight, expected.blocks[0].attention.qkv.weight)
    return refused


def test_random_mutants_never_crash_or_load_something_else(folder: Any) -> None:
    assert load_mutants(folder, 300, seed=1) > 200


@pytest.mark.slow
def test_ten_thousand_mutants(folder: Any) -> None:
    assert load_mutants(folder, 10_000, seed=2) > 7_000
