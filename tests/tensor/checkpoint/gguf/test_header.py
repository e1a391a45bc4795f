"""Tests headers with wrong contents: refused by name, in bounded memory, without a crash."""

from __future__ import annotations

import random
import struct
import tracemalloc
from itertools import pairwise
from pathlib import Path

import pytest
import torch
from gguf_files import Entry, entry, gguf_bytes

from headrace.core.errors import CheckpointError
from headrace.tensor.checkpoint.gguf.header import HeaderLimits, read_gguf_header
from headrace.tensor.checkpoint.gguf.paths import is_gguf, model_name
from headrace.tensor.checkpoint.gguf.shards import read_gguf

pytestmark = pytest.mark.pure

KEYS: dict[str, object] = {
    "general.architecture": "llama",
    "general.alignment": 32,
    "a.flag": True,
    "a.negative": -5,
    "a.number": 1e-5,
    "a.list": ["x", "yz", ""],
    "a.numbers": [1, 2, 3],
    "a.floats": [0.5, -1.0],
    "a.none": [],
}
TENSORS: dict[str, Entry] = {
    "matrix": entry(torch.arange(320.0).reshape(5, 64), "Q8_0"),
    "stack": entry(torch.arange(128.0).reshape(2, 2, 32), "Q4_0"),
    "vector": entry(torch.arange(7.0), "F32"),
}


def written(tmp_path: Path, content: bytes) -> Path:
    path = tmp_path / "model.gguf"
    path.write_bytes(content)
    return path


@pytest.mark.parametrize("version", [2, 3])
def test_a_header_is_read_as_it_was_written(tmp_path: Path, version: int) -> None:
    header = read_gguf_header(written(tmp_path, gguf_bytes(KEYS, TENSORS, version=version)))
    assert header.keys.values == KEYS
    assert {name: (tensor.kind.name, tensor.shape) for name, tensor in header.tensors.items()} == {
        name: (kind, shape) for name, (kind, shape, _) in TENSORS.items()
    }
    content = header.path.read_bytes()
    for name, (_, _, data) in TENSORS.items():
        assert content[header.tensors[name].begin : header.tensors[name].end] == data


def edited(find: bytes, put: bytes) -> bytes:
    content = gguf_bytes(KEYS, TENSORS)
    assert content.count(find) == 1
    return content.replace(find, put)


def text(value: str) -> bytes:
    return struct.pack("<Q", len(value)) + value.encode()


def aligned(alignment: int) -> bytes:
    return edited(b"general.alignment" + struct.pack("<II", 4, 32), b"general.alignment" + struct.pack("<II", 4, alignment))


HOSTILE = {
    "no file of this kind": (b"PK\x03\x04" + bytes(40), "does not begin with GGUF"),
    "empty": (b"", "does not begin with GGUF"),
    "big-endian": (b"GGUF" + struct.pack(">IQQ", 3, 0, 0), "is big-endian"),
    "version 1": (b"GGUF" + struct.pack("<IQQ", 1, 0, 0), "GGUF version 1"),
    "many tensors": (b"GGUF" + struct.pack("<IQQ", 3, 2**60, 0), "claims 1152921504606846976 tensors"),
    "tensors beyond the file": (b"GGUF" + struct.pack("<IQQ", 3, 1000, 0), "claims 1000 tensors, and 8 bytes are left"),
    "many keys": (b"GGUF" + struct.pack("<IQQ", 3, 0, 2**40), "claims 1099511627776 keys"),
    "a long name": (b"GGUF" + struct.pack("<IQQ", 3, 0, 1) + struct.pack("<Q", 2**50) + bytes(30), "bytes of text"),
    "a long string": (edited(text("yz"), struct.pack("<Q", 2**24) + b"yz"), "key .a.list. claims 16777216 bytes of text"),
    "a long list": (edited(struct.pack("<IQ", 4, 3), struct.pack("<IQ", 4, 2**22)), "key .a.numbers. claims 4194304 elements"),
    "a list of lists": (edited(struct.pack("<IIQ", 9, 4, 3), struct.pack("<IIQ", 9, 9, 3)), "array of arrays"),
    "a list of an unknown type": (edited(struct.pack("<IIQ", 9, 4, 3), struct.pack("<IIQ", 9, 77, 3)), "type 77"),
    "an unknown type": (edited(text("a.flag") + struct.pack("<I", 7), text("a.flag") + struct.pack("<I", 13)), "value of type 13"),
    "a key twice": (edited(text("a.none"), text("a.list")), "key .a.list. stands in the header twice"),
    "a tensor twice": (edited(text("vector"), text("matrix")), "tensor .matrix. stands in the header twice"),
    "no text": (edited(text("yz"), struct.pack("<Q", 2) + b"\xff\xfe"), "not UTF-8"),
    "alignment 48": (aligned(48), "power of"),
    "alignment 0": (aligned(0), "alignment"),
    "five dims": (edited(text("vector") + struct.pack("<I", 1), text("vector") + struct.pack("<I", 5)), "has 5 dimensions"),
    "a size of zero": (edited(text("vector") + struct.pack("<IQ", 1, 7), text("vector") + struct.pack("<IQ", 1, 0)), "dims .0."),
    "half a block": (edited(struct.pack("<QQ", 64, 5), struct.pack("<QQ", 65, 5)), "whole blocks of 32"),
    "a huge tensor": (edited(struct.pack("<QQ", 64, 5), struct.pack("<QQ", 2**62, 2**62)), "tensor .matrix. ends at byte"),
    "beyond the file": (gguf_bytes(KEYS, TENSORS)[:-1], "tensor .vector. ends at byte"),
    "an odd offset": (edited(struct.pack("<QQQIQ", 32, 2, 2, 2, 352), struct.pack("<QQQIQ", 32, 2, 2, 2, 353)), "no multiple of"),
    "an overlap": (edited(struct.pack("<QQQIQ", 32, 2, 2, 2, 352), struct.pack("<QQQIQ", 32, 2, 2, 2, 320)), "overlaps the tensor before"),
    "IQ4_XS": (edited(struct.pack("<QQI", 64, 5, 8), struct.pack("<QQI", 64, 5, 23)), "tensor .matrix. has type IQ4_XS.*llama-quantize"),
    "an unknown tensor type": (edited(struct.pack("<QQI", 64, 5, 8), struct.pack("<QQI", 64, 5, 999)), "has type number 999"),
}


@pytest.mark.parametrize("name", HOSTILE)
def test_a_header_that_lies_is_refused(tmp_path: Path, name: str) -> None:
    content, reason = HOSTILE[name]
    with pytest.raises(CheckpointError, match=reason) as caught:
        read_gguf_header(written(tmp_path, content))
    assert str(tmp_path / "model.gguf") in str(caught.value)


def test_what_is_no_file_is_refused(tmp_path: Path) -> None:
    for path in (tmp_path, tmp_path / "none.gguf"):
        with pytest.raises(CheckpointError):
            read_gguf_header(path)


def test_mutated_headers_are_read_or_refused_in_bounded_memory(tmp_path: Path) -> None:
    """A changed byte may make another right header (a name, a value); what passes must lie inside the file, without overlaps."""
    content = gguf_bytes(KEYS, TENSORS)
    length = len(content) - sum(len(data) for _, _, data in TENSORS.values())
    rng, num_refused = random.Random(0), 0
    for _ in range(300):
        changed = bytearray(content)
        for _ in range(rng.choice((1, 1, 2, 8))):
            changed[rng.randrange(4, length)] = rng.choice((0, 1, 0x7F, 0x80, 0xFF, rng.randrange(256)))
        path = written(tmp_path, bytes(changed[: rng.choice((len(changed), len(changed), rng.randrange(len(changed))))]))
        tracemalloc.start()
        try:
            header = read_gguf_header(path)
            places = sorted((tensor.begin, tensor.end) for tensor in header.tensors.values())
            assert all(end <= begin for (_, end), (begin, _) in pairwise(places))
            assert all(end <= len(changed) for _, end in places)
        except CheckpointError:
            num_refused += 1
        finally:
            peak = tracemalloc.get_traced_memory()[1]
            tracemalloc.stop()
        assert peak < 1 << 20
    assert 100 < num_refused < 300


def test_shards_are_one_model(tmp_path: Path) -> None:
    first = {**KEYS, "split.no": 0, "split.count": 2, "split.tensors.count": 3}
    names = ["big-00001-of-00002.gguf", "big-00002-of-00002.gguf"]
    (tmp_path / names[0]).write_bytes(gguf_bytes(first, {"matrix": TENSORS["matrix"]}))
    rest = {name: TENSORS[name] for name in ("stack", "vector")}
    (tmp_path / names[1]).write_bytes(gguf_bytes({"split.no": 1, "split.count": 2}, rest))
    model = read_gguf(tmp_path / names[0])
    assert {name: header.path.name for name, (header, _) in model.tensors.items()} == {
        "matrix": names[0],
        "stack": names[1],
        "vector": names[1],
    }
    with pytest.raises(CheckpointError, match="not the first of its shards"):
        read_gguf(tmp_path / names[1])
    for keys, tensors, reason in (
        ({"split.no": 1, "split.count": 3}, rest, "split.count"),
        ({"split.no": 0, "split.count": 2}, rest, "split.no"),
        ({"split.no": 1, "split.count": 2}, {"stack": TENSORS["stack"]}, "the files hold 2 tensors, not 3"),
        ({"split.no": 1, "split.count": 2}, {"matrix": TENSORS["matrix"]}, "tensor .matrix. is also in"),
    ):
        (tmp_path / names[1]).write_bytes(gguf_bytes(keys, tensors))
        with pytest.raises(CheckpointError, match=reason):
            read_gguf(tmp_path / names[0])
    (tmp_path / names[1]).unlink()
    with pytest.raises(CheckpointError, match=r"big-00002-of-00002.gguf"):
        read_gguf(tmp_path / names[0])
    (tmp_path / names[0]).rename(tmp_path / "renamed.gguf")
    with pytest.raises(CheckpointError, match=r"NAME-00001-of-00002.gguf"):
        read_gguf(tmp_path / "renamed.gguf")


@pytest.mark.parametrize(
    ("limits", "reason"),
    [
        (HeaderLimits(num_bytes=2000), r"claims 600 bytes of text, and \d+ bytes are left"),
        (HeaderLimits(num_elements=29), "claims 10 elements, and 9 are allowed"),
        (HeaderLimits(num_tensors=2), "claims 1 tensors, and 0 are allowed"),
        (HeaderLimits(num_keys=11), "claims 4 keys, and 3 are allowed"),
    ],
)
def test_shards_share_one_limit(limits: HeaderLimits, reason: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Three, each of which is within it."""
    monkeypatch.setattr("headrace.tensor.checkpoint.gguf.shards.HeaderLimits", lambda: limits)
    for number in range(3):
        keys: dict[str, object] = {"split.no": number, "split.count": 3, "filling": [1.5] * 10, "text": "x" * 600}
        (tmp_path / f"big-0000{number + 1}-of-00003.gguf").write_bytes(gguf_bytes(keys, {f"vector{number}": TENSORS["vector"]}))
    with pytest.raises(CheckpointError, match=f"big-00003-of-00003.gguf: .* {reason}"):
        read_gguf(tmp_path / "big-00001-of-00003.gguf")


def test_a_model_is_called_after_its_file() -> None:
    assert model_name(Path("/models/Qwen2.5-7B-Q4_K_M.gguf")) == "Qwen2.5-7B-Q4_K_M"
    assert model_name(Path("big-00001-of-00012.gguf")) == "big"
    assert is_gguf("a.GGUF")
    assert not is_gguf("gguf")
