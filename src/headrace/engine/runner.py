"""Executes a plan with tensors: one forward pass over a ragged batch, then sampling.

`ModelRunner` computes inside `submit`. `runner_overlapped` wraps a `ModelRunner` and computes on a thread of its own, so that the loop can
make the next plan meanwhile. Both call the same `execute`, in the order of submission, on one thread, so nothing here is locked. A plan's
columns become tensors in `runner_batch`; what is remembered between steps is in `runner_slots`; grammars act in `runner_masks`.

After a step that raised, its state changes (ended, started, block tables, moves) may be applied and its tokens are not. Repeating its KV
writes is harmless. A later plan that counted on the step's tokens raises `UnknownToken`. A later plan that succeeded all the same, and is
then planned again, is rewound first, so that no token is counted twice.
"""

from __future__ import annotations

from array import array
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Protocol

import numpy as np
import torch
from torch import Tensor

from headrace.core.errors import EngineFatal
from headrace.core.plan import NO_LOGPROBS, LogprobColumns, Plan, Result, int_column
from headrace.engine.failpoints import failpoint
from headrace.engine.runner_batch import (
    Rows,
    Selection,
    build_batch,
    count_prompt_logprobs,
    read_rows,
    refuse_drafts,
    refuse_moves_but_copies,
    select_tokens,
)
from headrace.engine.runner_masks import MaskSource, NoGrammars
from headrace.engine.runner_slots import Ints, SlotPart, SlotState, column
from headrace.tensor.batch import ForwardBatch, KvCache
from headrace.tensor.kernels.filters import Draw
from headrace.tensor.kernels.masks import ApplyMasks, apply_masks
from headrace.tensor.sampling import RowMasks, Sampled, Sampler, prompt_logprobs
from headrace.tensor.sampling.sampler import NOT_A_DISTRIBUTION

_PROMPT_LOGITS = 1 << 23
"""Logits computed at a time for prompt log-probabilities, 32 MiB of float32: [T, V] of a long prompt would not fit into memory."""


@dataclass(slots=True)
class PromptLogprobColumns:
    """Log-probabilities of prompt positions, in columns as in `Result`. failed: rows whose logits were not finite."""

    rows: array[int] = field(default_factory=int_column)
    counts: array[int] = field(default_factory=int_column)
    logprobs: LogprobColumns = field(default_factory=LogprobColumns)
    failed: set[int] = field(default_factory=set)


class Model(Protocol):
    """What the runner needs of a loaded model; `tensor.models.decoder.DecoderModel` is one."""

    vocab_size: int

    def forward(self, ids: Tensor, batch: ForwardBatch, kv: KvCache) -> Tensor:
        """ids [T] int64 -> hidden [T, E], or [W, E] for `batch.selected`; writes the step's keys and values into `kv`."""
        ...

    def logits(self, hidden: Tensor) -> Tensor:
        """hidden [N, E] -> [N, V], a new tensor."""
        ...


class CompletedStep:
    """The ticket of a step that has already been computed, or has already raised."""

    def __init__(self, outcome: Result | Exception) -> None:
        self._outcome = outcome

    def result(self) -> Result:
        if isinstance(self._outcome, Exception):
            raise self._outcome
        return self._outcome


class ModelRunner:
    """One model, its KV cache and every slot's state. Used by one thread at a time.

    max_num_seqs   number of slots, numbered from 0
    max_model_len  tokens of the longest sequence, prompt and output together
    draw           chooses the tokens of rows that are not greedy
    mask           applies grammar masks
    masks          of sequences that have a grammar; None: such a sequence is refused
    """

    def __init__(
        self,
        model: Model,
        kv: KvCache,
        *,
        max_num_seqs: int,
        max_model_len: int,
        draw: Draw,
        mask: ApplyMasks = apply_masks,
        masks: MaskSource | None = None,
        eos_token_ids: tuple[int, ...] = (),
        device: str = "cpu",
    ) -> None:
        self.model, self.kv, self._device = model, kv, device
        self._state = SlotState(max_num_seqs, max_model_len, len(kv.pools), kv.block_size)
        self._sampler = Sampler(model.vocab_size, eos_token_ids, draw, mask)
        self._masks = masks or NoGrammars()
        self._slot_parts: tuple[SlotPart, ...] = (self._state, self._sampler, self._masks)

    def submit(self, plan: Plan) -> CompletedStep:
        """Compute the plan now. Never raises: the ticket's `result` raises what the step raised."""
        try:
            return CompletedStep(self.execute(plan))
        except Exception as error:
            return CompletedStep(error)

    def close(self) -> None:
        """End the threads that fill masks. The garbage collector frees the rest."""
        self._masks.close()

    def execute(self, plan: Plan) -> Result:
        """Apply the plan's changes, compute its rows, remember the sampled tokens.

        Raises: whatever the computation raised; EngineFatal if the device itself failed, after which no result of it can be trusted.
        """
        try:
            with torch.inference_mode():
                self._apply(plan)
                if plan.num_rows == 0:
                    return Result(step_id=plan.step_id, token_counts=array("i"), token_ids=array("i"))
                return self._compute(plan)
        except torch.AcceleratorError as error:
            raise EngineFatal(f"the {self._device} device failed") from error

    def _apply(self, plan: Plan) -> None:
        """Points 1 to 4 of `core.plan`. Harmless to repeat. Raises ValueError, with nothing applied, for a move or draft it cannot do."""
        failpoint("runner.apply")
        refuse_moves_but_copies(plan)
        refuse_drafts(plan)
        ended = column(plan.ended)
        for part in self._slot_parts:
            part.end(ended)
            for started in plan.started:
                part.start(started)
        self._state.write_tables(plan)
        for group, source, target in zip(plan.move_groups, plan.move_sources, plan.move_targets, strict=True):
            self.kv.copy_block(group, source, target)

    def _compute(self, plan: Plan) -> Result:
        rows = read_rows(plan)
        sampling = np.flatnonzero(rows.samples)
        self._rewind(rows, sampling)
        failpoint("runner.batch")
        logprob_counts = count_prompt_logprobs(rows, self._state)
        selected = select_tokens(rows, logprob_counts)
        ids, batch = build_batch(rows, self._state, self._device, selected)
        failpoint("runner.masks")
        self._masks.begin(rows.mask_slots[sampling].tolist())
        failpoint("runner.forward")
        hidden = self.model.forward(ids, batch, self.kv)
        failed = {int(row) for row in np.flatnonzero(self._state.failed[rows.slots])}
        prompts = self._prompt_logprobs(rows, logprob_counts, selected, hidden)
        masks = self._masks.wait()
        sampled = self._sample(rows, sampling, selected, hidden, masks.masks)
        failed |= prompts.failed | {int(row) for row in sampling[sampled.failed]}
        errors = dict.fromkeys(failed, NOT_A_DISTRIBUTION) | {int(sampling[place]): why for place, why in masks.failures.items()}
        failpoint("runner.commit")
        self._commit(rows, sampling, sampled, errors)
        return _result(plan, sampling, sampled, prompts, errors)

    def _rewind(self, rows: Rows, sampling: Ints) -> None:
        """Forget tokens of a plan that was rolled back. A row that samples at a position whose token is known shows that one was."""
        state, ends = self._state, rows.ends
        for row in sampling[state.known[rows.slots[sampling]] > ends[sampling]]:
            slot = int(rows.slots[row])
            stale = state.token_ids[slot, ends[row] : state.known[slot]].astype(np.int64)
            for part in self._slot_parts:
                part.retract(slot, stale)

    def _sample(self, rows: Rows, sampling: Ints, selected: Selection, hidden: Tensor, masks: RowMasks) -> Sampled:
        """A token for each row in `sampling` [S], sampled from the logits of the row's last position."""
        if not len(sampling):
            return Sampled(np.zeros(0, dtype=np.int64), np.zeros(0, dtype=np.bool_), NO_LOGPROBS)
        last = torch.from_numpy(selected.places(rows.row_starts[sampling + 1] - 1)).to(hidden.device)
        failpoint("runner.logits")
        logits = self.model.logits(hidden if len(last) == len(hidden) else hidden[last])
        failpoint("runner.sample")
        return self._sampler.sample(logits, rows.slots[sampling], rows.ends[sampling], masks)

    def _prompt_logprobs(self, rows: Rows, logprob_counts: Ints, selected: Selection, hidden: Tensor) -> PromptLogprobColumns:
        """Log-probabilities of the prompt tokens computed in this step, for the rows that asked for them.

        logprob_counts  `count_prompt_logprobs` of `rows`
        """
        collected = PromptLogprobColumns()
        asked = np.flatnonzero(logprob_counts)
        for row, first in zip(asked.tolist(), selected.places(rows.row_starts[asked]).tolist(), strict=True):
            found = self._prompt_row(int(rows.slots[row]), int(rows.starts[row]), hidden[first : first + logprob_counts[row]])
            if found is None:
                collected.failed.add(row)
            else:
                collected.rows.append(row)
                collected.counts.append(len(found))
                collected.logprobs.extend(found)
        return collected

    def _prompt_row(self, slot: int, start: int, hidden: Tensor) -> LogprobColumns | None:
        """Log-probabilities of the N prompt tokens that follow positions start..start + N - 1, computed piece by piece.

        hidden  [N, E] hidden states of those positions

        Returns None if any of the logits are not finite.
        """
        piece, count = max(1, _PROMPT_LOGITS // self.model.vocab_size), len(hidden)
        collected = LogprobColumns()
        for begin in range(0, count, piece):
            end = min(begin + piece, count)
            failpoint("runner.prompt_logprobs")
            logits = self.model.logits(hidden[begin:end]).float().cpu().numpy()
            next_ids = self._state.token_ids[slot, start + begin + 1 : start + end + 1].astype(np.int64)
            found = prompt_logprobs(logits, next_ids, int(self._state.prompt_logprobs[slot]))
            if found is None:
                return None
            collected.extend(found)
        return collected

    def _commit(self, rows: Rows, sampling: Ints, sampled: Sampled, errors: Mapping[int, str]) -> None:
        """Point 6 of `core.plan`: record the sampled tokens. After this the step counts as done."""
        good = np.array([row not in errors for row in sampling.tolist()], dtype=np.bool_)
        slots, token_ids = rows.slots[sampling[good]], sampled.token_ids[good]
        for part in self._slot_parts:
            part.commit(slots, token_ids)
        self._state.failed[rows.slots[list(errors)]] = True


def _result(plan: Plan, sampling: Ints, sampled: Sampled, prompts: PromptLogprobColumns, errors: Mapping[int, str]) -> Result:
    counts = array("i", bytes(4 * plan.num_rows))
    token_ids = array("i")
    kept: list[int] = []
    for place, (row, token_id) in enumerate(zip(sampling.tolist(), sampled.token_ids.tolist(), strict=True)):
        if row not in errors:
            counts[row] = 1
            token_ids.append(token_id)
            kept.append(place)
    return Result(
        step_id=plan.step_id,
        token_counts=counts,
        token_ids=token_ids,
        logprobs=sampled.logprobs if len(kept) == len(sampling) else sampled.logprobs.picked(kept),
        prompt_rows=prompts.rows,
        prompt_counts=prompts.counts,
        prompt_logprobs=prompts.logprobs,
        errors=tuple(sorted(errors.items())),
    )
