"""Reads the headers of a GGUF model that may be split over several files, and joins their tensors into one map.

The caller names the first file; the other shards (NAME-00002-of-00005.gguf, ...) are found beside it.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from hashlib import blake2b
from math import prod
from pathlib import Path

from headrace.core.errors import CheckpointError, shorten
from headrace.tensor.checkpoint.config import ConfigFile
from headrace.tensor.checkpoint.gguf.header import FILE_TYPES, MAX_TENSORS, GgufHeader, GgufTensor, HeaderLimits, read_gguf_header
from headrace.tensor.checkpoint.gguf.paths import SHARD, SUFFIX

MAX_SHARDS = 4096


@dataclass(frozen=True, slots=True)
class GgufModel:
    """keys     of the first file, which has all of the model's metadata
    tensors  name -> (header of the file that holds the tensor, the tensor's entry)
    """

    headers: tuple[GgufHeader, ...]
    keys: ConfigFile
    tensors: dict[str, tuple[GgufHeader, GgufTensor]]

    @property
    def digest(self) -> str:
        return blake2b(b"".join(header.digest for header in self.headers), digest_size=16).hexdigest()

    @property
    def tensor_bytes(self) -> dict[str, int]:
        return {name: tensor.end - tensor.begin for name, (_, tensor) in self.tensors.items()}

    def most_frequent(self) -> str:
        counts: Counter[str] = Counter()
        for _, tensor in self.tensors.values():
            counts[tensor.kind.name] += prod(tensor.shape)
        return max(counts, key=lambda name: counts[name], default="F32")

    def title(self) -> str:
        """llama.cpp's name of the file's mixture of types, such as "Q4_K_M"; the most frequent type where the file does not say."""
        named = self.keys.values.get("general.file_type")
        return FILE_TYPES.get(named, self.most_frequent()) if isinstance(named, int) else self.most_frequent()


def read_gguf(path: Path) -> GgufModel:
    """Raises CheckpointError when a shard is missing or unreadable, when `path` is not the first shard, when a shard's number does not
    match its name, when two shards hold the same tensor, and when the number of tensors is zero or not the declared one.
    """
    limits = HeaderLimits()
    first = read_gguf_header(path, limits)
    headers = (first, *_further(first, limits))
    tensors: dict[str, tuple[GgufHeader, GgufTensor]] = {}
    for header in headers:
        for name, tensor in header.tensors.items():
            if name in tensors:
                raise CheckpointError(str(header.path), f"tensor {shorten(name)} is also in {tensors[name][0].path.name}")
            tensors[name] = header, tensor
    total = first.keys.integer("split.tensors.count", 0, MAX_TENSORS, default=len(tensors)) if len(headers) > 1 else len(tensors)
    if total != len(tensors) or not tensors:
        raise CheckpointError(str(path), f"the files hold {len(tensors)} tensors, not {total}" if tensors else "holds no tensor")
    return GgufModel(headers, first.keys, tensors)


def _further(first: GgufHeader, limits: HeaderLimits) -> Iterator[GgufHeader]:
    count = first.keys.integer("split.count", 0, MAX_SHARDS, default=1)
    if count <= 1:
        return
    if first.keys.integer("split.no", 0, MAX_SHARDS, default=0) != 0:
        first.keys.refuse("split.no", "is not the first of its shards", "Give the file whose name has -00001-of-.")
    found = SHARD.fullmatch(first.path.stem)
    if found is None or int(found[3]) != count:
        reason = f"must be the number in the file's name, NAME-00001-of-{count:05}{SUFFIX}"
        first.keys.refuse("split.count", reason, "Give all shards the names that they were made with.")
    for number in range(1, count):
        path = first.path.with_name(f"{found[1]}-{number + 1:05}-of-{count:05}{first.path.suffix}")
        header = read_gguf_header(path, limits)
        if header.keys.integer("split.no", 0, MAX_SHARDS, default=-1) != number:
            header.keys.refuse("split.no", f"must be {number} by the file's name")
        if header.keys.integer("split.count", 0, MAX_SHARDS, default=-1) != count:
            header.keys.refuse("split.count", f"must be {count}, as in the first shard")
        yield header
