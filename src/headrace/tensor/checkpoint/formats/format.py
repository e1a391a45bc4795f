"""Protocols of quantized checkpoint formats: what a format implements, and the tensors that it reads.

Shape letters: N outputs, K inputs of a linear.
"""

from __future__ import annotations

from typing import Protocol

from torch import Tensor

from headrace.tensor.kernels.rounding import Precision, RoundedWeight


class StoredParts(Protocol):
    """The stored tensors of a checkpoint, read by name. Every method raises CheckpointError when the tensor is missing.

    has_values  false where tensors are checked to be there and `read_part` gives zeros instead, which contradict nothing
    """

    @property
    def has_values(self) -> bool: ...

    def has(self, name: str) -> bool: ...

    def stored_dtype(self, name: str) -> str:
        """As safetensors names it, such as "BF16"."""
        ...

    def stored_shape(self, name: str) -> tuple[int, ...]: ...

    def read_part(self, name: str, shape: tuple[int, ...], dtypes: tuple[str, ...]) -> Tensor:
        """Raises CheckpointError also when its shape is not `shape` or its dtype none of `dtypes`, and when a float of 16 or 32 bits is NaN
        or infinite.
        """
        ...


class QuantizedWeight(Protocol):
    """The weight [N, K] of one linear, its stored tensors in memory, unchanged."""

    def dense(self, rows: slice) -> Tensor:
        """The dequantized outputs `rows`, float32 [len(rows), K], a new tensor."""
        ...

    def rounded(self, rows: slice) -> RoundedWeight | None:
        """The outputs `rows` in the integers or FP8 values in which they are stored. Scales and zero points may be rounded to float16.

        None where no kernel multiplies the stored form.
        """
        ...


class WeightFormat(Protocol):
    """A quantized format with the options of one checkpoint's config.json. precision: of most linears."""

    @property
    def method(self) -> str: ...

    @property
    def title(self) -> str: ...

    @property
    def precision(self) -> Precision: ...

    def precision_of(self, stem: str) -> Precision:
        """Precision in which the linear stays in memory: INT4, INT8 or FP8; NONE for a linear that is dequantized when read."""
        ...

    def is_quantized(self, parts: StoredParts, stem: str) -> bool:
        """Whether the linear `stem`, such as "model.layers.0.mlp.down_proj", is stored in this format, and not as a plain weight."""
        ...

    def stored_bytes(self, stem: str, shape: tuple[int, int]) -> float | None:
        """Bytes of a weight [N, K] with scales and zero points, by the configuration alone. None where it leaves the linear plain."""
        ...

    def open(self, parts: StoredParts, stem: str, shape: tuple[int, int]) -> QuantizedWeight:
        """Raises CheckpointError for tensors that are missing, or do not match the shape [N, K] or each other."""
        ...
