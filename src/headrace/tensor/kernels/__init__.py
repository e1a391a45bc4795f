"""The interface between a model and the code that computes for it.

`reference` is plain torch and defines every result; `cpu` is Numba and a library GEMM. A model is given a `Backend` and never asks which
one. Shape letters: see `tensor.batch`; E hidden size, F feed-forward size, V vocabulary.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor

from headrace.tensor.batch import PackedAdapter, StepAdapters
from headrace.tensor.kernels.choice import DeviceChoice
from headrace.tensor.kernels.filters import ApplyMasks, Draw, apply_masks, draw
from headrace.tensor.kernels.rounding import Precision, RoundedWeight


class Linear(Protocol):
    """Called with x [T, in], returns a new [T, out] of x's dtype."""

    in_features: int
    out_features: int
    weight_bytes: int

    def __call__(self, x: Tensor) -> Tensor: ...


@dataclass(frozen=True, slots=True, kw_only=True)
class PackedLinear:
    """kind   names the implementation's format
    group  inputs that share a scale; 0: all inputs share one, or there are no scales
    block  strips that a worker takes at a time, where their order in memory depends on it; else 0
    """

    kind: str
    out_features: int
    in_features: int
    group: int
    block: int
    tensors: Mapping[str, Tensor]


class Kernels(Protocol):
    """No argument is kept; outputs are fresh unless said."""

    def select(self, x: Tensor, rows: Tensor) -> Tensor:
        """x [T, ...] -> [W, ...]: the rows [W] int64."""
        ...

    def rms_norm(self, x: Tensor, weight: Tensor, eps: float, *, residual: Tensor | None = None) -> Tensor:
        """Computed in float32, times weight, in x's dtype. x may be [T, E] or [T, heads, D].

        With `residual` [T, E]: residual += x in place first, and the sum is what is normed.
        """
        ...

    def rotary(self, query: Tensor, key: Tensor, cos_sin: Tensor, positions: Tensor) -> None:
        """Rotate query [T, H, D] and key [T, K, D] in place (half-split layout, as Hugging Face Llama).

        cos_sin [max_positions, rotary_dim] float32: first half cos, second half sin. rotary_dim <= D; the rest of D is left alone.
        """
        ...

    def scatter_kv(self, key: Tensor, value: Tensor, cache: Tensor, slot_mapping: Tensor, *, kv_scales: Tensor | None = None) -> None:
        """Write key, value [T, K, D] into cache [B, 2, S, K, D] at slot_mapping [T] int64, rounded to the cache's dtype.

        A float8_e4m3fn cache holds the values themselves, those beyond +-448 as +-448. An int8 cache comes with kv_scales [B, 2, S, K]
        float32: a vector is stored as round(x * (127 / max |x|)), ties to even, its scale is max |x| / 127.
        """
        ...

    def rotary_scatter(
        self, query: Tensor, key: Tensor, value: Tensor, cos_sin: Tensor, positions: Tensor, cache: Tensor, slot_mapping: Tensor,
        *, kv_scales: Tensor | None = None,
    ) -> None:  # fmt: skip
        """`rotary` and `scatter_kv` in one pass. `key` itself may be rotated or not afterwards."""
        ...

    def attention(
        self,
        query: Tensor,
        cache: Tensor,
        block_table: Tensor,
        row_starts: Tensor,
        context_lens: Tensor,
        *,
        scale: float,
        window: int | None = None,
        kv_scales: Tensor | None = None,
        num_decodes: int = 0,
    ) -> Tensor:
        """Causal attention of a ragged batch over the paged cache, which already holds this step's keys and values.

        query [T, H, D]; block_table [R, M] int32; row_starts [R + 1] int32; context_lens [R] int32. The query token i of row r stands at
        position context_lens[r] - (row_starts[r + 1] - row_starts[r]) + i and sees positions (p - window, p]. Returns [T, H, D].

        num_decodes: that many leading rows have one token each. A hint that changes no result.
        """
        ...

    def gated_activation(self, gate_up: Tensor, activation: str) -> Tensor:
        """act(gate) * up for gate_up [T, 2F] = gate | up; activation "silu" or "gelu_tanh". Returns [T, F]."""
        ...


class WeightPacking(Protocol):
    """keeps_stored: whether the weights of a quantized checkpoint are multiplied in few bits; else they are made dense."""

    keeps_stored: bool

    def pack_linear(self, weight: Tensor, bias: Tensor | None, dtype: torch.dtype | None = None) -> Linear:
        """weight [out, in], bias [out]; the caller may drop its own reference afterwards.

        dtype: of the products, where that is not the weight's; every value of the weight is exact in it. Rows and bias are in
        `activation_dtype(dtype)`.
        """
        ...

    def activation_dtype(self, dtype: torch.dtype) -> torch.dtype:
        """The dtype of a model's activations for products in `dtype`; a wider one where packing a panel rounds rows."""
        ...

    def round_weight(self, weight: Tensor, precision: Precision) -> RoundedWeight:
        """Equal to `rounding.round_weight`, with the backend's choice of groups, to the bit for finite weights."""
        ...

    def can_pack(self, weight: RoundedWeight) -> bool: ...

    def pack_rounded(self, weight: RoundedWeight, bias: Tensor | None) -> Linear: ...


@dataclass(frozen=True, slots=True, kw_only=True)
class LowRankUpdate:
    """y[first_row : first_row + rows] += scale * up (down x), of one linear. down [r, in], up [rows, r], both float32 or both bfloat16."""

    down: Tensor
    up: Tensor
    scale: float
    first_row: int = 0


class AdapterKernels(Protocol):
    def pack(self, linears: Sequence[Sequence[LowRankUpdate]]) -> PackedAdapter:
        """One adapter: the updates of each adapted linear of the model, in the model's order; none for a linear that it leaves alone. The
        tensors are copied."""
        ...

    def apply(self, y: Tensor, x: Tensor, linear: int, step: StepAdapters) -> Tensor:
        """y [T, out] of the base, x [T, in]: y plus each token's update, in y's dtype; y may be written in place. Sums are float32.

        linear: its number in `pack`. `step` is asked when the operation runs, also when it is replayed.
        """
        ...


class Experts(Protocol):
    """The host does not read which experts were chosen."""

    def __call__(self, x: Tensor, experts: Tensor) -> Tensor:
        """x [T, E], the chosen experts of each token [T, top_k] int64 -> each one's output [T * top_k, E], by (token, choice).

        The number that follows the last expert's is none: such rows of the output hold anything.
        """
        ...


class GroupExperts(Protocol):
    def __call__(self, gate_up: Sequence[Linear], down: Sequence[Linear], activation: str) -> Experts | None:
        """None for linears that cannot be run together. The linears stay valid."""
        ...


class RowReader(Protocol):
    def __call__(self, descriptor: int, start: int, num_rows: int, columns: int, dtype: torch.dtype, ids: Tensor) -> Tensor:
        """Rows `ids` [T] int64 of a table [num_rows, columns] at byte `start` of an open file -> [T, columns].

        Raises: IndexError for an id that is no row; OSError if the file cannot be read, or has become shorter than the table.
        """
        ...


class PackedFormat(Protocol):
    def packed_layout(self, precision: Precision) -> str: ...

    def packed(self, linear: Linear) -> PackedLinear | None:
        """None for a linear that cannot be stored."""
        ...

    def load_packed(self, packed: PackedLinear) -> Linear:
        """Raises ValueError for tensors that cannot be a linear."""
        ...

    def row_reader(self) -> RowReader:
        """Reads rows of embedding tables, which stay in the packed file. What it takes is compiled when this returns."""
        ...


class Recording(Protocol):
    """is_whole  False: some operation was not recorded, so the recording must not be replayed"""

    is_whole: bool
    kept_bytes: int

    def replay(self) -> bool:
        """Run the operations over what their inputs hold now, into the same outputs. False: this step needs others, and none was run."""
        ...


class StepExecutor(Protocol):
    """Only for layers that run nothing but the backend's kernels, and declare it (`layers.can_be_deferred`): other code inside would read
    results that have not been computed yet."""

    max_recorded_bytes: int

    def deferred(self, num_tokens: int) -> AbstractContextManager[None]:
        """Operations called inside may run as late as at its end: their results must not be read before, but may be passed to another
        linear or operation of the same backend, or be viewed."""
        ...

    def recording(self, num_tokens: int) -> AbstractContextManager[Recording] | None:
        """As `deferred`, for steps that come again with other values in the same tensors; None for steps that are not recorded.

        Arguments are kept, and `replay` writes the results again. An operation that torch computes makes the recording not whole.
        """
        ...

    def next_layer(self) -> None:
        """Layer n begins. Inside `deferred` and `recording` its results may overwrite those of layer n - 2: a tensor that must last longer
        is made before the first layer, or copied."""
        ...


class KernelCompiler(Protocol):
    """packages  names of those whose versions may change a bit of a result
    expected  about how many functions a start compiles, whatever model it serves; None: that depends on the model
    """

    packages: tuple[str, ...]
    expected: int | None

    def limit_threads(self, num_threads: int) -> str:
        """Process-wide. Returns the name of the layer that starts the threads."""
        ...

    def kept(self) -> tuple[bool, str]:
        """(whether compiled kernels are kept for the next start; where, or why not, in words)."""
        ...

    def reporting(self, report: Callable[[int], None]) -> AbstractContextManager[None]:
        """Inside, `report` is called with the number of functions compiled so far: 0 when the first begins, never if none is compiled."""
        ...

    def ahead(self, dtype: torch.dtype, kv_dtype: torch.dtype) -> AbstractContextManager[None]:
        """Inside, another process may compile some of what a start needs that computes in these dtypes."""
        ...


@dataclass(frozen=True, slots=True, kw_only=True)
class Backend:
    """A new backend brings `kernels`; `reference.PACKING` and the defaults serve for the rest.

    compiler       None: torch and NumPy run all of it
    packed_format  None: nothing that `packing` prepares is kept on disk
    draw           on the host and at once; the plain one sorts, which is slow where vocabularies are large
    mask           equals the plain one's results to the bit
    choice         None: the host chooses, and a step is computed where it is called
    adapters       None: no linear can have adapters
    group_experts  None: one after another, each over the tokens that chose it
    numerics       what the bits of its results depend on beside source, versions and thread count, in words
    """

    name: str
    kernels: Kernels
    packing: WeightPacking
    packed_format: PackedFormat | None = None
    compiler: KernelCompiler | None = None
    executor: StepExecutor | None = None
    draw: Draw = draw
    mask: ApplyMasks = apply_masks
    choice: DeviceChoice | None = None
    adapters: AdapterKernels | None = None
    group_experts: GroupExperts | None = None
    numerics: str = ""

    def limit_threads(self, num_threads: int) -> str:
        """Process-wide, before the first step."""
        layer = "none" if self.compiler is None else self.compiler.limit_threads(num_threads)
        torch.set_num_threads(num_threads)
        return layer
