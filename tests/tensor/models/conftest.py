"""Makes tiny random checkpoints by transformers, and feeds our models ragged, paged batches."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Protocol

import pytest
import torch
import transformers
from torch import Tensor

from headrace.tensor.batch import ForwardBatch, GroupBatch, PackedAdapter, StepAdapters, allocate_kv
from headrace.tensor.device import CPU
from headrace.tensor.models.decoder import DecoderModel

BLOCK_SIZE = 4


@pytest.fixture(scope="session", autouse=True)
def _quiet_transformers() -> Iterator[None]:
    """transformers' progress bars and advice are noise here; its word on odd tiny configs is not ours to test."""
    transformers.logging.set_verbosity_error()
    transformers.logging.disable_progress_bar()
    threads = torch.get_num_threads()
    torch.set_num_threads(1)  # tiny matrices: threads only cost
    yield
    torch.set_num_threads(threads)


class OracleModel(Protocol):
    """What we use of a transformers model."""

    def __call__(self, ids: Tensor) -> Any: ...
    def save_pretrained(self, folder: Path, **options: Any) -> Any: ...


@dataclass
class Oracle:
    """A transformers model in float32."""

    model: OracleModel

    def logits(self, tokens: list[int]) -> Tensor:
        """[len(tokens), V] in one dense forward pass without any cache."""
        with torch.inference_mode():
            logits: Tensor = self.model(torch.tensor([tokens])).logits[0]
        return logits.float()


def _randomize(model: torch.nn.Module, seed: int) -> None:
    """Weights that make every part matter: unit-variance linears, norms around what leaves the signal alone, biases of size 0.3."""
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for name, weight in sorted(model.named_parameters()):
            noise = torch.randn(weight.shape, generator=generator)
            if name.endswith("norm.weight"):
                weight.add_(noise * 0.2)
            elif weight.dim() == 1:
                weight.copy_(noise * 0.3)
            else:
                weight.copy_(noise / weight.shape[-1] ** 0.5)


MakeOracle = Callable[..., Oracle]


@pytest.fixture(scope="session")
def make_oracle() -> MakeOracle:
    """make_oracle("Llama", folder, seed=0, **config fields) -> a transformers model saved into `folder`."""

    def make(family: str, folder: Path, *, seed: int = 0, save: dict[str, Any] | None = None, **fields: Any) -> Oracle:
        config_name = "Gemma3TextConfig" if family == "Gemma3" else f"{family}Config"
        config = getattr(transformers, config_name)(**fields)
        config._attn_implementation = "eager"
        model = getattr(transformers, f"{family}ForCausalLM")(config).float().eval()
        _randomize(model, seed)
        model.save_pretrained(folder, **(save or {}))
        return Oracle(model)

    return make


@dataclass
class _Row:
    tokens: list[int]
    tables: list[list[int]]
    computed: int = 0
    place: int = 0
    logits: list[Tensor] = field(default_factory=list)


class PagedRun:
    """Sequences over a paged cache with shuffled block ids, computed in ragged steps. resident: adapters by place."""

    def __init__(
        self, model: DecoderModel, *, num_blocks: int = 96, seed: int = 0, dtype: torch.dtype = torch.float32,
        resident: tuple[PackedAdapter | None, ...] = (None,),
    ) -> None:  # fmt: skip
        self.model, self.resident = model, resident
        groups = len(model.kv_groups)
        self.kv = allocate_kv(model.kv_shapes, model.group_of, (num_blocks,) * groups, BLOCK_SIZE, dtype, CPU)
        for layer in self.kv.layers:
            layer.values.fill_(float("nan"))  # what was not written must not be read
        self.pools = [random.Random(seed + group).sample(range(1, num_blocks), num_blocks - 1) for group in range(groups)]
        self.rows: list[_Row] = []

    def add(self, tokens: list[int], *, prefix_of: int | None = None, shared_blocks: int = 0, place: int = 0) -> int:
        """A sequence; with prefix_of its first blocks are those of another, already computed one."""
        tables = [self.rows[prefix_of].tables[g][:shared_blocks] if prefix_of is not None else [] for g in range(len(self.pools))]
        needed = -(-len(tokens) // BLOCK_SIZE)
        for table, pool in zip(tables, self.pools, strict=True):
            table.extend(pool.pop() for _ in range(needed - len(table)))
        self.rows.append(_Row(tokens, tables, shared_blocks * BLOCK_SIZE, place))
        return len(self.rows) - 1

    def step(self, counts: dict[int, int], selected: list[int] | None = None) -> None:
        """Compute the next `count` tokens of each row, rows in the order given; logits of all, or of the step's `selected` tokens."""
        rows = [(self.rows[index], count) for index, count in counts.items()]
        ids = [t for row, count in rows for t in row.tokens[row.computed : row.computed + count]]
        positions = [p for row, count in rows for p in range(row.computed, row.computed + count)]
        starts = [0]
        for _, count in rows:
            starts.append(starts[-1] + count)
        batch = ForwardBatch(
            positions=torch.tensor(positions),
            row_starts=torch.tensor(starts, dtype=torch.int32),
            context_lens=torch.tensor([row.computed + count for row, count in rows], dtype=torch.int32),
            max_count=max(counts.values()),
            groups=tuple(self._group(g, rows) for g in range(len(self.pools))),
            adapters=self._adapters(rows, selected),
            selected=None if selected is None else torch.tensor(selected, dtype=torch.int64),
        )
        with torch.inference_mode():
            hidden = self.model.forward(torch.tensor(ids), batch, self.kv)
            logits = self.model.logits(hidden) if len(hidden) else torch.empty(0, self.model.vocab_size)
        tokens = [] if self.model.place.rank else range(len(ids)) if selected is None else selected
        assert len(logits) == len(tokens)
        for (row, count), start in zip(rows, starts[:-1], strict=True):
            row.logits.append(logits[[start <= token < start + count for token in tokens]])
            row.computed += count

    def _adapters(self, rows: list[tuple[_Row, int]], selected: list[int] | None) -> StepAdapters | None:
        slots = torch.tensor([row.place for row, count in rows for _ in range(count)], dtype=torch.int32)
        return StepAdapters(slots, self.resident, None if selected is None else slots[selected]) if slots.any() else None

    def _group(self, group: int, rows: list[tuple[_Row, int]]) -> GroupBatch:
        width = max(-(-(row.computed + count) // BLOCK_SIZE) for row, count in rows)
        table = torch.zeros((len(rows), width), dtype=torch.int32)
        slots = []
        for number, (row, count) in enumerate(rows):
            blocks = row.tables[group]
            used = -(-(row.computed + count) // BLOCK_SIZE)
            table[number, :used] = torch.tensor(blocks[:used])
            slots += [blocks[p // BLOCK_SIZE] * BLOCK_SIZE + p % BLOCK_SIZE for p in range(row.computed, row.computed + count)]
            self._spoil_before_window(table[number], group, row.computed)
        return GroupBatch(table, torch.tensor(slots))

    def _spoil_before_window(self, table: Tensor, group: int, computed: int) -> None:
        """Entries wholly before the window may be stale: point them at the pad block, which holds NaN."""
        window = self.model.kv_groups[group].window
        if window is not None:
            table[: max(0, computed - window + 1) // BLOCK_SIZE] = 0

    def finish(self, chunk: int) -> None:
        """Compute every row to its end, at most `chunk` tokens of each per step."""
        while waiting := {i: min(chunk, len(r.tokens) - r.computed) for i, r in enumerate(self.rows) if r.computed < len(r.tokens)}:
            self.step(waiting)

    def logits(self, index: int) -> Tensor:
        """[computed tokens, V] of a row, in order; shared blocks were not computed."""
        return torch.cat(self.rows[index].logits)


@pytest.fixture(scope="session")
def paged_run() -> type[PagedRun]:
    return PagedRun


def _assert_close(ours: Tensor, reference: Tensor) -> None:
    """Per row max|difference| <= 1e-4 * max|reference|; equal argmax wherever the reference's top-2 gap exceeds that."""
    assert ours.shape == reference.shape
    bound = 1e-4 * reference.abs().amax(dim=-1)
    difference = (ours - reference).abs().amax(dim=-1)
    assert (difference <= bound).all(), f"worst ratio {(difference / bound).max():.1f} of the bound"
    best = reference.topk(2, dim=-1).values
    clear = best[:, 0] - best[:, 1] > bound
    assert clear.any()
    assert torch.equal(ours.argmax(dim=-1)[clear], reference.argmax(dim=-1)[clear])


@pytest.fixture(scope="session")
def assert_close() -> Callable[[Tensor, Tensor], None]:
    return _assert_close
