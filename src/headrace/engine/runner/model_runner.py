"""Executes a plan with tensors: one forward pass over a ragged batch, then sampling.

Plans are executed in the order of submission, on one thread, so nothing here is locked.

After a step that raised, its state changes may be applied and its tokens are not. A later plan that counted on those tokens raises
`UnknownToken`; one that succeeded and is planned again is rewound first.
"""

from __future__ import annotations

import logging
import queue
import threading
import time
from array import array
from collections.abc import Callable
from concurrent.futures import Future
from dataclasses import replace
from functools import partial
from typing import Protocol

import numpy as np
import torch
from torch import Tensor

from headrace.core.errors import EngineFatal
from headrace.core.plan import NO_LOGPROBS, Plan, Result
from headrace.engine.failpoints import failpoint
from headrace.engine.runner.batch import (
    Positions,
    Resident,
    Rows,
    Selection,
    build_batch,
    count_prompt_logprobs,
    drafts_nothing,
    select_tokens,
    upload_each,
)
from headrace.engine.runner.drafts import MakeDrafter
from headrace.engine.runner.masks import MaskSource, NoGrammars
from headrace.engine.runner.results import PromptLogprobs, are_good, empty_result, make_result, row_errors
from headrace.engine.runner.slots import SlotState, column
from headrace.engine.runner.state import RunnerState
from headrace.tensor.batch import ForwardBatch, KvCache
from headrace.tensor.kernels.filters import ApplyMasks, Draw, apply_masks
from headrace.tensor.sampling import RowMasks, Sampled, Sampler

log = logging.getLogger(__name__)


class Model(Protocol):
    vocab_size: int

    def forward(self, ids: Tensor, batch: ForwardBatch, kv: KvCache) -> Tensor:
        """ids [T] int64 -> hidden [T, E], or [W, E] for `batch.selected`; writes the step's keys and values into `kv`."""
        ...

    def logits(self, hidden: Tensor) -> Tensor:
        """hidden [N, E] -> [N, V], a new tensor."""
        ...


class CompletedStep:
    def __init__(self, outcome: Result | Exception) -> None:
        self._outcome = outcome

    def result(self) -> Result:
        if isinstance(self._outcome, Exception):
            raise self._outcome
        return self._outcome


class ModelRunner:
    """Computes plans with one model, its KV cache and state by slot. Used by one thread at a time.

    masks          masks of sequences that have a grammar; None: a sequence with a grammar is refused
    resident       the adapters by place, asked once for each step, which holds them until it is done; None: rows with adapters are refused
    drafter        None: a plan that asks for drafts is refused
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
        resident: Callable[[], Resident] | None = None,
        drafter: MakeDrafter | None = None,
    ) -> None:
        self.model, self.kv, self._device, self._resident = model, kv, device, resident
        self._slots = SlotState(max_num_seqs, max_model_len, len(kv.pools), kv.block_size)
        self._sampler = Sampler(model.vocab_size, eos_token_ids, draw, mask)
        self._masks = masks or NoGrammars()
        self._drafter = None if drafter is None else drafter(self._slots, self._sampler)
        parts = () if self._drafter is None else (self._drafter,)
        self._state = RunnerState(kv, self._slots, self._sampler, self._masks, *parts)
        self._prompts = PromptLogprobs(model.logits, model.vocab_size, self._slots)
        self._upload = partial(upload_each, device=device)

    def submit(self, plan: Plan) -> CompletedStep:
        try:
            return CompletedStep(self.execute(plan))
        except Exception as error:
            return CompletedStep(error)

    def close(self) -> None:
        self._masks.close()
        if self._drafter is not None:
            self._drafter.close()

    def execute(self, plan: Plan) -> Result:
        """Raises EngineFatal if the device itself failed, after which no result of it can be trusted."""
        try:
            with torch.inference_mode():
                self._state.apply(plan)
                if plan.num_rows == 0:
                    return empty_result(plan)
                return self._compute(plan)
        except torch.AcceleratorError as error:
            raise EngineFatal(f"the {self._device} device failed") from error

    def _compute(self, plan: Plan) -> Result:
        resident = self._resident() if self._resident is not None else ()
        rows, positions = self._state.read(plan, resident)
        failed_before = self._slots.failed[rows.slots]
        logprob_counts = count_prompt_logprobs(rows, self._slots)
        selected = select_tokens(rows, positions, logprob_counts)
        ids, batch = build_batch(rows, self._slots, self._upload, selected, resident)
        failpoint("runner.masks")
        self._masks.begin(rows.mask_slots[positions.rows].tolist(), () if positions.given is None else positions.given.tolist())
        failpoint("runner.forward")
        hidden = self.model.forward(ids, batch, self.kv)
        prompts = self._prompts.compute(rows, logprob_counts, selected, hidden)
        masks = self._masks.wait()
        sampled = self._sample(positions, selected, hidden, masks.masks)
        failed = sampled.failed
        if positions.drafts is not None:
            is_accepted = positions.accepted(sampled.token_ids, masks.unknown)
            failed = failed & is_accepted
        mask_failures = {int(positions.rows[place]): why for place, why in masks.failures.items()}
        errors = row_errors(positions.rows[failed], prompts, failed_before, mask_failures)
        failpoint("runner.commit")
        is_kept = are_good(positions.rows, errors)
        if positions.drafts is not None:
            is_kept &= is_accepted
        self._state.commit(positions.slots[is_kept], sampled.token_ids[is_kept], rows.slots[list(errors)])
        result = make_result(plan, positions.rows, is_kept, sampled, prompts, errors)
        return self._with_drafts(plan, rows, result) if any(plan.num_drafts) else result

    def _sample(self, positions: Positions, selected: Selection, hidden: Tensor, masks: RowMasks) -> Sampled:
        if not len(positions):
            return Sampled(np.zeros(0, dtype=np.int64), np.zeros(0, dtype=np.bool_), NO_LOGPROBS)
        tokens = torch.from_numpy(selected.places(positions.tokens)).to(hidden.device)
        failpoint("runner.logits")
        logits = self.model.logits(hidden if len(tokens) == len(hidden) else hidden[tokens])
        failpoint("runner.sample")
        return self._sampler.sample(logits, positions.slots, positions.places, masks, positions.given)

    def _with_drafts(self, plan: Plan, rows: Rows, result: Result) -> Result:
        """Drafts follow the rows that gave a token."""
        if self._drafter is None:
            raise drafts_nothing(plan)
        most = column(plan.num_drafts)
        drafting = np.flatnonzero((most > 0) & (column(result.token_counts) > 0))
        begun = time.monotonic()
        drafts = self._drafter.draft(rows.slots[drafting], most[drafting])
        drafting_s = time.monotonic() - begun
        counts = np.zeros(len(rows.slots), dtype=np.int32)
        counts[drafting] = [len(each) for each in drafts]
        flat = np.concatenate(drafts).astype(np.int32) if counts.any() else np.zeros(0, dtype=np.int32)
        draft_counts, flat_drafts = array("i", counts.tobytes()), array("i", flat.tobytes())
        return replace(result, draft_counts=draft_counts, drafts=flat_drafts, drafting_s=drafting_s)


CLOSE_TIMEOUT_S = 10.0


class OverlappedRunner:
    """Has a `ModelRunner` compute the submitted plans in a thread beside the loop. The thread is a daemon and no executor's:
    Python waits for those when it exits, and a step that hangs would keep the process alive.
    """

    def __init__(self, runner: ModelRunner, *, close_timeout_s: float = CLOSE_TIMEOUT_S) -> None:
        self._runner = runner
        self._close_timeout_s = close_timeout_s
        self._steps: queue.SimpleQueue[tuple[Plan, Future[Result]] | None] = queue.SimpleQueue()
        self._closed = False
        self._thread = threading.Thread(target=self._compute, name="headrace-step", daemon=True)
        self._thread.start()

    def submit(self, plan: Plan) -> Future[Result]:
        """Raises RuntimeError after `close`."""
        if self._closed:
            raise RuntimeError("the runner is closed")
        ticket: Future[Result] = Future()
        self._steps.put((plan, ticket))
        return ticket

    def close(self) -> None:
        """A step that does not end in time is abandoned with a line in the log."""
        if self._closed:
            return
        self._closed = True
        self._drop_not_begun()
        self._steps.put(None)
        self._thread.join(self._close_timeout_s)
        if self._thread.is_alive():
            log.error("a step has not ended %g s after the runner was closed; its thread is left behind", self._close_timeout_s)
            return
        self._runner.close()

    def _drop_not_begun(self) -> None:
        while True:
            try:
                item = self._steps.get_nowait()
            except queue.Empty:
                return
            if item is not None:
                item[1].cancel()

    def _compute(self) -> None:
        while (item := self._steps.get()) is not None:
            plan, ticket = item
            if self._closed or not ticket.set_running_or_notify_cancel():
                ticket.cancel()
                continue
            try:
                ticket.set_result(self._runner.execute(plan))
            except BaseException as error:  # the ticket raises it where the step is waited for
                ticket.set_exception(error)
