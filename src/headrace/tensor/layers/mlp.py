"""The gated feed-forward block: act(gate x) * (up x), then down."""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor

from headrace.tensor.batch import ForwardBatch
from headrace.tensor.kernels import Linear
from headrace.tensor.layers.weights import Part, WeightReader, stacked_parts


@dataclass(frozen=True, slots=True, kw_only=True)
class MlpSpec:
    """activation: a name `Kernels.gated_activation` knows."""

    size: int
    activation: str = "silu"
    bias: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class MlpNames:
    """Tensor names below the layer's prefix, without ".weight". gate_up: two names, or one whose rows are gate, then up."""

    gate_up: tuple[str, ...] = ("mlp.gate_proj", "mlp.up_proj")
    down: str = "mlp.down_proj"


class Mlp:
    runs_only_kernels = True

    def __init__(self, reader: WeightReader, prefix: str, spec: MlpSpec, names: MlpNames, hidden_size: int) -> None:
        self.kernels, self.activation, self.reduce = reader.kernels, spec.activation, reader.peers.reduce
        self.gate_up = reader.column_linear(stacked_parts(prefix, names.gate_up, [spec.size, spec.size]), hidden_size, bias=spec.bias)
        self.down = reader.row_linear(Part(f"{prefix}{names.down}.weight", hidden_size), spec.size, bias=spec.bias)

    @property
    def linears(self) -> tuple[Linear, ...]:
        return self.gate_up, self.down

    @property
    def parts(self) -> tuple[object, ...]:
        return self.linears

    def __call__(self, x: Tensor, batch: ForwardBatch) -> Tensor:
        """x [T, E], or [W, E] for the batch's selected tokens -> the same shape, summed over ranks."""
        return self.reduce(self.down(self.kernels.gated_activation(self.gate_up(x), self.activation)))

    def weight_bytes(self, *, one_token: bool) -> int:
        """A dense block reads all its weights for one token as well."""
        return sum(linear.weight_bytes for linear in self.linears)
