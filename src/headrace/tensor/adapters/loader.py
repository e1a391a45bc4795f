"""Loads one adapter for one rank of a model: the whole folder is checked before a tensor is packed, and what is not computed is refused by
name.

The tensors decide which linears change. adapter_config.json gives their scales and must agree. A rank has the rows of lora_B that it has of
the weight, and the columns of lora_A: the base linear's own sum over ranks adds up the updates too.
"""

from __future__ import annotations

import os
import re
from collections.abc import Iterable
from dataclasses import dataclass
from hashlib import blake2b
from pathlib import Path

import torch
from torch import Tensor

from headrace.core.errors import CheckpointError, shorten
from headrace.core.regular_files import read_file
from headrace.machine.folders import inside
from headrace.tensor.adapters.config import CONFIG, MERGE, AdapterConfig, layer_of, parse_config
from headrace.tensor.batch import PackedAdapter
from headrace.tensor.checkpoint.config import ConfigFile
from headrace.tensor.checkpoint.files import MAX_JSON_BYTES, decode_json
from headrace.tensor.checkpoint.folder import READABLE_DTYPES
from headrace.tensor.checkpoint.header import DAMAGED, Header, StoredTensor, read_header
from headrace.tensor.checkpoint.values import num_not_finite
from headrace.tensor.host.pages import read_bytes
from headrace.tensor.kernels import LowRankUpdate
from headrace.tensor.layers.adapted import AdaptedPart, ModelAdapters

WEIGHTS = "adapter_model.safetensors"
PICKLE = "adapter_model.bin"
SAFE = "Save it again with a recent PEFT: save_pretrained writes safetensors."
PREFIX = "base_model.model."
PADDING = 64
"""Rows, inputs and ranks in a backend's packed form are multiples of at most this."""
RANK_PADDING = 16
UPDATE_BYTES = 1 << 10
"""More than a backend's tables take for one update."""
_NAME = re.compile(rf"{re.escape(PREFIX)}(?P<linear>.+)\.lora_(?P<side>[AB])\.weight")
_STRANGERS = (
    ("lora_magnitude_vector", "DoRA is not computed"),
    ("lora_embedding_", "embeddings have no adapters here"),
    ("embed_tokens", "embeddings have no adapters here"),
    ("lm_head", "the head has no adapters here"),
    (".experts", "experts have no adapters here"),
    ("modules_to_save", "whole modules are not replaced"),
    (".bias", "biases are not computed"),
)


@dataclass(frozen=True, slots=True)
class _Place:
    """This rank's part of a stored weight. columns: of the weight"""

    linear: int
    columns: range
    part: AdaptedPart


@dataclass(frozen=True, slots=True)
class _Checked:
    """A folder whose files may hold an adapter of the model; values are not read yet.

    pairs: name of a linear -> lora_A, lora_B
    """

    config_bytes: bytes
    config: AdapterConfig
    header: Header
    pairs: dict[str, tuple[StoredTensor, StoredTensor]]


class AdapterLoader:
    """Not for two threads at once where memory counts: a call holds one file's bytes and one packed adapter.

    max_bytes       of the largest adapter that may be loaded, this rank's part as packed
    max_file_bytes  of its file, which every rank reads whole
    """

    def __init__(self, adapters: ModelAdapters, max_rank: int) -> None:
        self._kernels, self._max_rank, self._num_linears = adapters.kernels, max_rank, len(adapters.linears)
        self._shapes = adapters.shapes
        self._places = {
            part.name: _Place(number, linear.columns, part)
            for number, linear in enumerate(adapters.linears)
            for part in linear.parts_of_output
        }
        own = [(place.part.rows, len(place.columns)) for place in self._places.values()]
        self.max_bytes, self.max_file_bytes = (_most_bytes(shapes, max_rank) for shapes in (own, self._shapes.values()))

    def inspect(self, folder: Path) -> str:
        """The digest, hex, of both files' bytes. Raises CheckpointError for what `load` would not load."""
        checked = self._check(folder)
        data = self._read(folder, checked)
        for name, pair in checked.pairs.items():
            for side, stored in zip("AB", pair, strict=True):
                _values(folder, f"{PREFIX}{name}.lora_{side}.weight", data, stored, checked.header)
        return _digest(checked, data)

    def load(self, folder: Path, digest: str) -> PackedAdapter:
        """Raises CheckpointError, also where the files have another digest by now."""
        checked = self._check(folder)
        data = self._read(folder, checked)
        if _digest(checked, data) != digest:
            raise CheckpointError(str(folder), "its files have changed since they were inspected", "Load the adapter again.")
        linears: list[list[LowRankUpdate]] = [[] for _ in range(self._num_linears)]
        for name, place in self._places.items():
            if name in checked.pairs:
                down, up = (
                    _values(folder, f"{PREFIX}{name}.lora_{side}.weight", data, stored, checked.header)
                    for side, stored in zip("AB", checked.pairs[name], strict=True)
                )
                down, up = _same_dtype(down[:, place.columns.start : place.columns.stop], _picked(up, place.part.stored))
                scale = checked.config.scale_of(name)
                linears[place.linear].append(LowRankUpdate(down=down, up=up, scale=scale, first_row=place.part.first_row))
        return self._kernels.pack(linears)

    def zeros(self) -> PackedAdapter:
        """An adapter that changes nothing, of rank 1 on every linear."""
        linears: list[list[LowRankUpdate]] = [[] for _ in range(self._num_linears)]
        for place in self._places.values():
            down, up = torch.zeros(1, len(place.columns)), torch.zeros(place.part.rows, 1)
            linears[place.linear].append(LowRankUpdate(down=down, up=up, scale=1.0, first_row=place.part.first_row))
        return self._kernels.pack(linears)

    def _check(self, folder: Path) -> _Checked:
        if not os.path.isdir(folder):
            raise CheckpointError(str(folder), "not a folder", f"Give a local folder with {CONFIG} and {WEIGHTS}.")
        path = inside(folder, CONFIG)
        try:
            config_bytes = read_file(path, MAX_JSON_BYTES)
        except OSError as error:
            raise CheckpointError(str(path), f"cannot be read ({error.strerror})") from error
        config = parse_config(ConfigFile(str(path), decode_json(str(path), config_bytes)))
        if not os.path.lexists(folder / WEIGHTS) and os.path.lexists(folder / PICKLE):
            raise CheckpointError(str(folder / PICKLE), "pickles are not read, since they may run code", SAFE)
        header = read_header(inside(folder, WEIGHTS))
        return _Checked(config_bytes, config, header, self._pairs(folder / WEIGHTS, header, config))

    def _pairs(self, path: Path, header: Header, config: AdapterConfig) -> dict[str, tuple[StoredTensor, StoredTensor]]:
        sides: dict[str, dict[str, StoredTensor]] = {}
        for name, stored in header.tensors.items():
            found = _NAME.fullmatch(name)
            if found is None or found["linear"] not in self._shapes:
                reason = next((why for piece, why in _STRANGERS if piece in name), "it belongs to no linear of the base model")
                raise CheckpointError(str(path), f"tensor {shorten(name)}: {reason}", MERGE)
            if stored.dtype not in READABLE_DTYPES:
                raise CheckpointError(str(path), f"tensor {name} has dtype {stored.dtype}", f"Readable are {', '.join(READABLE_DTYPES)}.")
            sides.setdefault(found["linear"], {})[found["side"]] = stored
        if not sides:
            raise CheckpointError(str(path), "no tensors in it", SAFE)
        for linear, pair in sides.items():
            if len(pair) < 2:
                missing = "B" if "A" in pair else "A"
                raise CheckpointError(str(path), f"tensor {PREFIX}{linear}.lora_{missing}.weight is missing", DAMAGED)
            self._check_pair(path, linear, pair["A"], pair["B"], config)
        self._check_layers(path, {layer_of(name) for name in sides}, config)
        return {linear: (pair["A"], pair["B"]) for linear, pair in sides.items()}

    def _check_layers(self, path: Path, changed: set[int | None], config: AdapterConfig) -> None:
        """A base with more layers of the same shapes would answer with half an adapter."""
        for name in self._shapes:
            if layer_of(name) not in changed and config.has_target(name):
                reason = f"no tensor of layer {layer_of(name)}, with the target {name}: the adapter's own base may have fewer layers"
                raise CheckpointError(str(path), reason, "Use its own base, or name its layers in layers_to_transform.")

    def _check_pair(self, path: Path, name: str, down: StoredTensor, up: StoredTensor, config: AdapterConfig) -> None:
        (rows, inputs), rank = self._shapes[name], down.shape[0] if down.shape else 0
        shapes = {"A": (down.shape, (rank, inputs)), "B": (up.shape, (rows, rank))}
        for side, (shape, expected) in shapes.items():
            if shape != expected:
                reason = f"tensor {PREFIX}{name}.lora_{side}.weight has shape {list(shape)}, the model makes it {list(expected)}"
                raise CheckpointError(str(path), reason, "Use an adapter that was trained on this base model.")
        if rank > self._max_rank:
            reason = f"tensor {PREFIX}{name}.lora_A.weight has rank {rank}, more than max_lora_rank = {self._max_rank}"
            raise CheckpointError(str(path), reason, "Raise max_lora_rank.")
        if rank != config.rank_of(name):
            reason = f"{name} has rank {config.rank_of(name)} by r and rank_pattern, and {rank} in {WEIGHTS}"
            raise CheckpointError(str(path.with_name(CONFIG)), reason, "Take both files from one adapter.")
        config.scale_of(name)  # whose patterns may be refused
        if not config.has_target(name):
            reason = f"{WEIGHTS} changes {name}, which target_modules, exclude_modules and layers_to_transform leave alone"
            raise CheckpointError(str(path.with_name(CONFIG)), reason, "Take both files from one adapter.")

    def _read(self, folder: Path, checked: _Checked) -> Tensor:
        """The file's size is bounded: each tensor has been found to be one of the model's, with its shape."""
        path, header = folder / WEIGHTS, checked.header
        size = header.data_start + max(stored.end for stored in header.tensors.values())
        try:
            data = read_bytes(path, 0, size)
        except OSError as error:
            raise CheckpointError(str(path), f"cannot be read ({error})") from error
        if blake2b(data[8 : header.data_start].numpy().data, digest_size=16).digest() != header.digest:
            raise CheckpointError(str(path), "it changed while it was read", "Load the adapter again.")
        return data


def _most_bytes(shapes: Iterable[tuple[int, int]], max_rank: int) -> int:
    """shapes: outputs, inputs"""
    rank = _padded(max_rank, RANK_PADDING)
    return sum(4 * rank * (_padded(inputs, PADDING) + _padded(rows, PADDING)) + UPDATE_BYTES for rows, inputs in shapes)


def _padded(number: int, multiple: int) -> int:
    return -(-number // multiple) * multiple


def _picked(up: Tensor, rows: tuple[range, ...]) -> Tensor:
    pieces = [up[each.start : each.stop] for each in rows]
    return pieces[0] if len(pieces) == 1 else torch.cat(pieces)


def _digest(checked: _Checked, data: Tensor) -> str:
    state = blake2b(digest_size=32)
    for name, piece in ((CONFIG, memoryview(checked.config_bytes)), (WEIGHTS, data.numpy().data)):
        state.update(f"{name} {len(piece)}\n".encode())
        state.update(piece)
    return state.hexdigest()


def _values(folder: Path, name: str, data: Tensor, stored: StoredTensor, header: Header) -> Tensor:
    """In the stored dtype: a view of `data`, or a copy where that is not aligned."""
    dtype = READABLE_DTYPES[stored.dtype]
    piece = data[header.data_start + stored.begin : header.data_start + stored.end]
    if piece.data_ptr() % dtype.itemsize:
        piece = piece.clone()
    values = piece.view(dtype)
    if (number := num_not_finite(values)) > 0:
        raise CheckpointError(str(folder / WEIGHTS), f"tensor {name} holds {number} values that are NaN or infinite", DAMAGED)
    return values.view(stored.shape)


def _same_dtype(down: Tensor, up: Tensor) -> tuple[Tensor, Tensor]:
    pair = down.float(), up.float()
    rounded = tuple(each.to(torch.bfloat16) for each in pair)
    return (rounded[0], rounded[1]) if all(map(torch.equal, pair, (each.float() for each in rounded))) else pair
