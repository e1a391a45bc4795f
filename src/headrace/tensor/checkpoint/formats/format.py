"""What a format of quantized weights gives, and what it reads from. Shape letters: N outputs, K inputs of a linear."""

from __future__ import annotations

from typing import Protocol

from torch import Tensor

from headrace.tensor.kernels.rounding import Precision, RoundedWeight


class StoredParts(Protocol):
    """The tensors of a checkpoint; `tensor.checkpoint.folder.Checkpoint` is one."""

    def has(self, name: str) -> bool: ...

    def stored_dtype(self, name: str) -> str:
        """safetensors' word for the dtype. Raises CheckpointError when the tensor is missing."""
        ...

    def stored_shape(self, name: str) -> tuple[int, ...]:
        """Raises CheckpointError when the tensor is missing."""
        ...

    def read_part(self, name: str, shape: tuple[int, ...], dtypes: tuple[str, ...]) -> Tensor:
        """A whole tensor, of this shape and one of these dtypes; floats of 16 and 32 bits are finite. Raises CheckpointError."""
        ...


class QuantizedWeight(Protocol):
    """One linear's weight [N, K], its parts in memory as they are stored."""

    def dense(self, rows: slice) -> Tensor:
        """The outputs `rows` of the weight that the parts stand for, float32 [len(rows), K], a new tensor."""
        ...

    def rounded(self, rows: slice) -> RoundedWeight | None:
        """The same outputs in few bits, scales and zero points at most rounded to float16; None where there is no such form."""
        ...


class WeightFormat(Protocol):
    """How a checkpoint's linears are stored, by its config.json.

    method     its `quant_method`
    title      for people, e.g. "gptq, 4 bits in groups of 128"
    precision  of most linears; see `precision_of`
    """

    @property
    def method(self) -> str: ...

    @property
    def title(self) -> str: ...

    @property
    def precision(self) -> Precision: ...

    def precision_of(self, stem: str) -> Precision:
        """In how many bits a linear of this format is held: INT4, INT8 or FP8, or NONE for one that is made dense."""
        ...

    def is_quantized(self, parts: StoredParts, stem: str) -> bool:
        """Whether the linear `stem`, e.g. "model.layers.0.mlp.down_proj", is stored in this format. Others are stored as plain weights."""
        ...

    def open(self, parts: StoredParts, stem: str, shape: tuple[int, int]) -> QuantizedWeight:
        """Read the parts of a weight [N, K]. Raises CheckpointError for parts that are missing or contradict the shape or each other."""
        ...
