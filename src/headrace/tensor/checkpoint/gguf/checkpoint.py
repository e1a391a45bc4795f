"""Reads the weights of a GGUF file by their Hugging Face names, dequantized or as stored integers, a few rows at a time."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from hashlib import blake2b
from math import prod
from pathlib import Path
from typing import NamedTuple, NoReturn

import torch
from torch import Tensor

from headrace.core.errors import CheckpointError, shorten
from headrace.tensor.checkpoint.config import ConfigFile
from headrace.tensor.checkpoint.formats.nibbles import SLAB_ELEMENTS, nibbles
from headrace.tensor.checkpoint.gguf.architectures import FACTORS, TensorPlace, name_table
from headrace.tensor.checkpoint.gguf.blocks import DENSE, NIBBLES
from headrace.tensor.checkpoint.gguf.folder import find_source
from headrace.tensor.checkpoint.gguf.header import DAMAGED, GgufHeader, GgufTensor
from headrace.tensor.checkpoint.gguf.shards import read_gguf
from headrace.tensor.checkpoint.values import num_not_finite
from headrace.tensor.host.pages import read_bytes
from headrace.tensor.kernels.rounding import Precision, RoundedWeight

PLAIN = {"F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16}
_SAMPLE_BYTES = 4096


@dataclass(frozen=True, slots=True)
class GgufFormat:
    """title: for people, e.g. "gguf Q4_K_M"."""

    title: str
    method = "gguf"

    @property
    def precision(self) -> Precision:
        kind = self.title.removeprefix("gguf ")
        return Precision.NONE if kind in PLAIN else Precision.INT4 if kind.startswith("Q4") else Precision.INT8


class _Part(NamedTuple):
    """Which of a tensor's rows are read for some rows of a weight: [begin, end), whole heads where the file permutes rows within heads.

    order  which of these are the weight's, in its order; None: all as they are
    rows   those that are wanted, counted from `begin`
    """

    begin: int
    end: int
    order: Tensor | None
    rows: slice


def _part(place: TensorPlace, outputs: int, rows: slice) -> _Part:
    first, last, _ = rows.indices(outputs)
    if place.heads is None:
        return _Part(first, last, None, slice(None))
    size = outputs // place.heads
    begin, end = first // size * size, -(-last // size) * size
    order = torch.arange(end - begin).view(-1, size // 2, 2).transpose(1, 2).reshape(-1)
    return _Part(begin, end, order, slice(first - begin, last - begin))


def read_format(section: ConfigFile) -> GgufFormat:
    return GgufFormat(f"gguf {section.text('stored', 'blocks')}")


class GgufCheckpoint:
    def __init__(self, folder: Path) -> None:
        """folder: made by `gguf.folder.make_folder`. Raises CheckpointError, also if the GGUF file has changed since."""
        source = find_source(folder)
        self.folder = folder
        self._model = read_gguf(source.first)
        if self._model.digest != source.digest:
            raise CheckpointError(str(source.first), "has changed since its tokenizer was read", "Start again.")
        self._names = name_table(self._model)
        self._read: set[str] = set(FACTORS)

    @property
    def config_files(self) -> list[Path]:
        return [self.folder / "config.json"]

    @property
    def files(self) -> list[Path]:
        return [header.path for header in self._model.headers]

    def has(self, name: str) -> bool:
        return self._place(name) is not None

    def stored_dtype(self, name: str) -> str:
        return self._find(name)[2].kind.name

    def expect(self, name: str, shape: tuple[int, ...]) -> None:
        """For `check_all_read` the tensor counts as read."""
        place, header, tensor = self._find(name)
        stored = tensor.shape if place.expert is None else tensor.shape[1:]
        if stored != shape or (place.expert is not None and place.expert >= tensor.shape[0]):
            self._refuse(header, f"tensor {place.name} has shape {list(tensor.shape)}, config.json makes {name} {list(shape)}")
        if len(shape) > 2 or (len(shape) == 1 and tensor.kind.name not in PLAIN):
            self._refuse(header, f"tensor {place.name} is {tensor.kind.name} of {list(tensor.shape)}, which is not supported")
        if place.heads is not None and (not place.heads or shape[0] % (2 * place.heads)):
            self._refuse(header, f"tensor {place.name} has {shape[0]} rows, which are no pairs of {place.heads} heads")
        self._read.add(place.name)

    def read(self, name: str, shape: tuple[int, ...], region: tuple[slice, ...] = ()) -> Tensor:
        """In memory of its own: plain values in the stored dtype, blocks in float32."""
        self.expect(name, shape)
        place, header, tensor = self._find(name)
        width = shape[1] if len(shape) == 2 else 1
        rows, columns = (*region, slice(None), slice(None))[:2]
        part = _part(place, shape[0], rows)
        begin, end = part.begin, part.end
        offset = 0 if place.expert is None else place.expert * prod(shape)
        values = self._rows(header, tensor, place.name, offset // width + begin, offset // width + end, width)
        if part.order is not None:
            values = values[part.order]
        if self._names.adds_one(place.name):
            values = values.float() - 1
        values = values[part.rows, columns]
        return values if len(shape) == 2 else values[:, 0]

    def precision_of(self, name: str) -> Precision:
        kind = self.stored_dtype(name)
        return Precision.NONE if kind in PLAIN else Precision.INT4 if kind in NIBBLES else Precision.INT8

    def rounded(self, name: str, shape: tuple[int, ...], rows: slice) -> RoundedWeight | None:
        self.expect(name, shape)
        place, header, tensor = self._find(name)
        if tensor.kind.name not in NIBBLES:
            return None
        part = _part(place, shape[0], rows)
        begin, end = part.begin, part.end
        offset = 0 if place.expert is None else place.expert * shape[0]
        pieces = self._blocks(header, tensor, place.name, offset + begin, offset + end, shape[1])
        found = [NIBBLES[tensor.kind.name](data) for _, data in pieces]
        if not found:
            return None
        values, scales, zeros = (None if each[0] is None else torch.cat(each).view(end - begin, -1) for each in zip(*found, strict=True))
        assert values is not None
        assert scales is not None
        if not all(bool(each.isfinite().all()) for each in (scales, zeros) if each is not None):
            self._refuse(header, f"tensor {place.name} holds scales that are NaN or infinite", DAMAGED)
        weight = nibbles(values, scales, zeros)
        return weight if weight is None or part.order is None else weight.rows(part.order[part.rows])

    def check_all_read(self) -> None:
        extra = sorted(self._model.tensors.keys() - self._read)
        if extra:
            shown = ", ".join(shorten(name) for name in extra[:3])
            self._refuse(self._model.tensors[extra[0]][0], f"{len(extra)} tensors this architecture does not have, e.g. {shown}")

    def digest(self) -> str:
        """Hex digest of config.json, every header, and both ends (4 KiB) of every tensor: a sample, as `Checkpoint.digest` takes."""
        state = blake2b((self.folder / "config.json").read_bytes(), digest_size=16, person=b"headrace-model")
        state.update(self._model.digest.encode())
        for header in self._model.headers:
            with header.path.open("rb") as stream:
                for tensor in sorted(header.tensors.values(), key=lambda tensor: tensor.begin):
                    for position in sorted({tensor.begin, max(tensor.begin, tensor.end - _SAMPLE_BYTES)}):
                        stream.seek(position)
                        state.update(stream.read(min(_SAMPLE_BYTES, tensor.end - position)))
        return state.hexdigest()

    def _rows(self, header: GgufHeader, tensor: GgufTensor, name: str, first: int, last: int, width: int) -> Tensor:
        kind = tensor.kind
        found = torch.empty((last - first, width), dtype=PLAIN.get(kind.name, torch.float32))
        for part, data in self._blocks(header, tensor, name, first, last, width):
            dense = data.reshape(-1).view(PLAIN[kind.name]) if kind.name in PLAIN else DENSE[kind.name](data)
            found[part] = dense.view(-1, width)
        if (number := num_not_finite(found)) > 0:
            self._refuse(header, f"tensor {name} holds {number} values that are NaN or infinite", DAMAGED)
        return found

    @staticmethod
    def _blocks(header: GgufHeader, tensor: GgufTensor, name: str, first: int, last: int, width: int) -> Iterator[tuple[slice, Tensor]]:
        """Rows [first, last) of `width` values each, a few at a time: which of them, counted from `first`, and their blocks' bytes."""
        kind = tensor.kind
        row_bytes = width // kind.block * kind.num_bytes
        step = max(1, SLAB_ELEMENTS // width)
        for begin in range(first, last, step):
            end = min(begin + step, last)
            try:
                data = read_bytes(header.path, tensor.begin + begin * row_bytes, (end - begin) * row_bytes)
            except OSError as error:
                raise CheckpointError(str(header.path), f"tensor {name} cannot be read ({error})") from error
            yield slice(begin - first, end - first), data.view(-1, kind.num_bytes)

    def _place(self, name: str) -> TensorPlace | None:
        return next((place for place in self._names.find(name) if place.name in self._model.tensors), None)

    def _find(self, name: str) -> tuple[TensorPlace, GgufHeader, GgufTensor]:
        if (place := self._place(name)) is None:
            places = self._names.find(name)
            called = f" ({places[0].name})" if places else ""
            raise CheckpointError(str(self._model.headers[0].path), f"tensor {name}{called} is missing")
        return place, *self._model.tensors[place.name]

    @staticmethod
    def _refuse(header: GgufHeader, reason: str, remedy: str = "") -> NoReturn:
        raise CheckpointError(str(header.path), reason, remedy)
