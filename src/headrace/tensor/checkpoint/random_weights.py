"""Stand-ins for a checkpoint's weights: seeded random weights, and shapes that take no memory."""

from __future__ import annotations

import math
from hashlib import blake2b

import torch
from torch import Tensor

from headrace.tensor.kernels.rounding import Precision, RoundedWeight, round_weight


class RandomWeights:
    """Uniform random weights of a trained model's scale, a function of seed, tensor name and device: ranks slice the same tensor.

    norm_weight  1, or 0 where the model adds 1
    device       torch's word for where they are drawn: weights for a GPU are drawn there, and none has to be copied
    """

    def __init__(self, seed: int, dtype: torch.dtype, norm_weight: float, device: str = "cpu") -> None:
        self._seed, self._dtype, self._norm_weight, self._device = seed, dtype, norm_weight, device

    def has(self, name: str) -> bool:
        """False: there are no optional tensors, so tied embeddings stay tied, and each expert has tensors of its own."""
        return False

    def expect(self, name: str, shape: tuple[int, ...]) -> None:
        """Every tensor exists."""

    def read(self, name: str, shape: tuple[int, ...], region: tuple[slice, ...] = ()) -> Tensor:
        weight = torch.empty(shape, dtype=self._dtype, device=self._device)
        if len(shape) == 1 and name.endswith("norm.weight"):
            return weight.fill_(self._norm_weight)[region or (slice(None),)]
        key = blake2b(f"{self._seed}:{name}".encode(), digest_size=8).digest()
        generator = torch.Generator(self._device).manual_seed(int.from_bytes(key, "little") >> 1)
        bound = math.sqrt(3.0 / shape[-1])  # outputs of a linear have unit variance for inputs of unit variance
        return weight.uniform_(-bound, bound, generator=generator)[region or (slice(None),)]


class WeightShapes:
    """Tensors on the meta device: notes the shapes of what a model would read and allocates nothing.

    precision, head: of the linears of a quantized checkpoint, and of its head.
    """

    def __init__(self, dtype: torch.dtype, precision: Precision = Precision.NONE, head: Precision = Precision.NONE) -> None:
        self._dtype, self._precision, self._head = dtype, precision, head
        self.shapes: dict[str, tuple[int, ...]] = {}

    @property
    def num_parameters(self) -> int:
        return sum(map(math.prod, self.shapes.values()))

    def has(self, name: str) -> bool:
        return False

    def expect(self, name: str, shape: tuple[int, ...]) -> None:
        """Every tensor exists."""

    def read(self, name: str, shape: tuple[int, ...], region: tuple[slice, ...] = ()) -> Tensor:
        self.shapes[name] = shape
        return torch.empty(shape, dtype=self._dtype, device="meta")[region or (slice(None),)]

    def precision_of(self, name: str) -> Precision:
        """A tied head goes by its table's name."""
        return self._head if name.startswith(("lm_head", "model.embed_tokens")) else self._precision

    def rounded(self, name: str, shape: tuple[int, ...], rows: slice) -> RoundedWeight | None:
        return round_weight(self.read(name, shape, (rows,)), self.precision_of(name))
