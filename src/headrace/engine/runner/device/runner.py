"""Executes plans on a device whose steps are launched first and finished later: `submit` enqueues a step, its ticket's `result` waits
for it.

The parts of a plan are enqueued in this order (`device.steps`):
  - block tables, and rows of one token, replayed from a graph;
  - rows of prompts, in a batch of their own, replayed where a captured size has room for them;
  - the choice of all tokens, replayed.

A row whose token is still in flight takes that token on the device. The host waits for the steps in flight where a row of several
tokens needs their tokens, a slot's counts are written anew, or a grammar's mask is filled.

A generation per slot keeps a late token out of a slot that was given to another sequence.
"""

from __future__ import annotations

import traceback
from array import array
from collections import deque
from collections.abc import Callable, Mapping
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray

from headrace.core.errors import EngineFatal
from headrace.core.plan import Plan, Result
from headrace.core.sampling import MAX_STOP_TOKEN_IDS
from headrace.engine.failpoints import failpoint
from headrace.engine.runner.batch import (
    Resident,
    Rows,
    UnknownToken,
    build_batch,
    count_prompt_logprobs,
    read_rows,
    refuse_drafts,
    refuse_unknown_ids,
    sampled_positions,
    select_tokens,
)
from headrace.engine.runner.device.adapters import NO_PLACES, DevicePlaces
from headrace.engine.runner.device.choice import SlotChoice, read_chosen
from headrace.engine.runner.device.steps import Choices, DeviceModel, DeviceSteps, TableChanges
from headrace.engine.runner.masks import MaskSource, NoGrammars
from headrace.engine.runner.model_runner import CompletedStep
from headrace.engine.runner.results import PromptLogprobColumns, PromptLogprobs, are_good, empty_result, make_result, row_errors
from headrace.engine.runner.slots import Ints, SlotState
from headrace.engine.runner.state import RunnerState
from headrace.tensor.batch import KvCache
from headrace.tensor.kernels.choice import ChoiceKind, DeviceChoice, Field
from headrace.tensor.launches import Launches


@dataclass(frozen=True, slots=True)
class RowLayout:
    """The rows of a plan, sorted by how they are computed.

    prompts   other rows, except `reported`
    reported  prompt rows with log-probabilities asked for. They need all hidden states, so they are not replayed
    chosen    rows with a place in the choice: those of the three columns in order, except prompt rows that do not sample
    """

    decodes: Ints
    prompts: Ints
    reported: Ints
    chosen: Ints

    @classmethod
    def of(cls, rows: Rows, logprob_counts: Ints) -> RowLayout:
        is_reported = logprob_counts > 0
        is_prompt = (rows.counts > 1) & ~is_reported
        decodes, prompts, reported = (np.flatnonzero(mine) for mine in (~is_prompt & ~is_reported, is_prompt, is_reported))
        sampling = [some[rows.samples[some] > 0] for some in (prompts, reported)]
        return cls(decodes, prompts, reported, np.concatenate((decodes, *sampling)))


class LaunchedStep:
    """A step that was launched on the device, and its ticket.

    sampling       [S] the rows that sample, ascending; places [S]: their places in the choice
    generations    [R] generations of the rows' slots at the launch
    num_top        [S] most likely tokens to list per row; -1: no log-probabilities
    adapters       whose memory the device may be reading
    """

    def __init__(
        self,
        finish: Callable[[LaunchedStep], None],
        plan: Plan,
        rows: Rows,
        choices: Choices,
        *,
        sampling: Ints,
        places: Ints,
        generations: Ints,
        num_top: Ints,
        prompts: PromptLogprobColumns,
        mask_failures: Mapping[int, str],
    ) -> None:
        self._finish, self.plan, self.rows, self.choices = finish, plan, rows, choices
        self.sampling, self.places, self.generations, self.num_top = sampling, places, generations, num_top
        self.prompts, self.mask_failures = prompts, mask_failures
        self.adapters: Resident = ()
        self.outcome: Result | Exception | None = None

    def result(self) -> Result:
        self._finish(self)
        assert self.outcome is not None
        return CompletedStep(self.outcome).result()


class DeviceRunner:
    """Runs one model on a device, with its KV cache and state by slot. Used by one thread at a time."""

    def __init__(
        self,
        model: DeviceModel,
        kv: KvCache,
        choice: DeviceChoice,
        launches: Launches,
        *,
        max_num_seqs: int,
        most_tokens: int,
        max_model_len: int,
        device: str,
        masks: MaskSource | None = None,
        eos_token_ids: tuple[int, ...] = (),
        places: DevicePlaces = NO_PLACES,
    ) -> None:
        self._launches, self._device = launches, device
        self._slots = SlotState(max_num_seqs, max_model_len, len(kv.pools), kv.block_size)
        self._changes = TableChanges(len(kv.pools), max_num_seqs + 1, self._slots.table_width)
        self._steps = DeviceSteps(
            model, kv, choice, launches, max_num_seqs=max_num_seqs, most_tokens=most_tokens,
            table_shape=(len(kv.pools), self._slots.table_width), max_ends=len(eos_token_ids) + MAX_STOP_TOKEN_IDS, device=device,
            places=places,
        )  # fmt: skip
        self._places = places
        self._choice = SlotChoice(self._slots, self._steps.slots, self._steps.upload, eos_token_ids)
        self._masks = masks or NoGrammars()
        self._state = RunnerState(kv, self._slots, self._choice, self._masks)
        self._prompts = PromptLogprobs(model.head, model.vocab_size, self._slots)
        self._vocab_size = model.vocab_size
        self._generations = np.zeros(max_num_seqs, dtype=np.int64)
        self._num_in_flight = np.zeros(max_num_seqs, dtype=np.int64)
        self._flight: deque[LaunchedStep] = deque()

    def capture(self) -> None:
        self._steps.capture()

    def submit(self, plan: Plan) -> LaunchedStep | CompletedStep:
        try:
            with torch.inference_mode():
                self._apply(plan)
                if plan.num_rows == 0:
                    return CompletedStep(empty_result(plan))
                adapters = self._places.resident() if any(plan.adapter_slots) else ()
                return self._launch(plan, read_rows(plan, adapters), adapters)
        except Exception as error:
            self._choice.mark_unsent(plan.slots)
            return CompletedStep(self._reason(error))

    def close(self) -> None:
        self._masks.close()

    def finish(self, step: LaunchedStep) -> None:
        while step.outcome is None:
            self._finish_oldest()

    def _reason(self, error: Exception) -> Exception:
        """Clears the frames of the failed step, which hold its tensors."""
        traceback.clear_frames(error.__traceback__)
        if not self._launches.is_lost(error):
            return error
        fatal = EngineFatal(f"the {self._device} device failed: {error!r:.200}")
        fatal.__cause__ = error
        return fatal

    # launching

    def _apply(self, plan: Plan) -> None:
        refuse_drafts(plan)
        changed = [*plan.ended, *(started.slot for started in plan.started)]
        self._generations[changed] += 1
        self._num_in_flight[changed] = 0
        self._state.apply(plan)
        self._changes.add(plan)

    def _launch(self, plan: Plan, rows: Rows, adapters: Resident) -> LaunchedStep:
        self._finish_where_needed(rows)
        self._state.rewind(rows)
        self._refuse_unknown(rows)
        logprob_counts = count_prompt_logprobs(rows, self._slots)
        layout = RowLayout.of(rows, logprob_counts)
        masked = np.where(rows.samples[layout.chosen] > 0, rows.mask_slots[layout.chosen], -1)
        is_early = not self._num_in_flight[masked[masked >= 0]].any()
        if is_early:
            self._begin_masks(masked)
        failpoint("device.inputs")
        kind = self._send(rows, layout, masked)
        if adapters:
            self._steps.adapters.send(adapters, rows.picked(layout.decodes), rows.picked(layout.prompts))
        failpoint("device.forward")
        if len(layout.decodes):
            self._steps.decode(len(layout.decodes), bool(rows.adapters[layout.decodes].any()))
        else:
            self._steps.write_tables()
        prompts = self._compute_prompts(rows, layout, logprob_counts, adapters)
        if not is_early:  # the forward pass runs meanwhile
            while self._flight:
                self._finish_oldest()
            self._refuse_unknown(rows)
            self._begin_masks(masked)
        masks = self._masks.wait()
        self._steps.send_masks(masks.masks.words)
        failpoint("device.choice")
        if len(layout.chosen):
            self._steps.choose(len(layout.chosen), kind)
        self._changes.clear()
        mask_failures = {int(layout.chosen[place]): why for place, why in masks.failures.items()}
        step = self._launched(plan, rows, layout, kind, prompts, mask_failures)
        step.adapters = adapters
        return step

    def _finish_where_needed(self, rows: Rows) -> None:
        in_flight = self._num_in_flight[rows.slots]
        is_plain = (rows.counts == 1) & (self._slots.known[rows.slots] + in_flight == rows.ends) & ~self._choice.unsent(rows.slots)
        if ((in_flight > 0) & ~is_plain).any():
            while self._flight:
                self._finish_oldest()

    def _refuse_unknown(self, rows: Rows) -> None:
        slots = rows.slots
        refuse_unknown_ids(rows, self._slots.known[slots] + self._num_in_flight[slots], self._slots.failed[slots])

    def _begin_masks(self, masked: Ints) -> None:
        failpoint("device.masks")
        self._masks.begin(masked.tolist())

    def _send(self, rows: Rows, layout: RowLayout, masked: Ints) -> ChoiceKind:
        inputs, own = self._steps.new_inputs(), rows.picked(layout.decodes)
        fields = inputs.fields[:, : len(own.slots)]
        is_in_flight = own.ends > self._slots.known[own.slots]
        fields[Field.ID] = np.where(is_in_flight, -1, self._slots.token_ids[own.slots, own.starts])
        fields[Field.ROW_SLOT], fields[Field.POSITION], fields[Field.CONTEXT] = own.slots, own.starts, own.ends
        places = np.flatnonzero(rows.samples[layout.chosen])
        chosen = layout.chosen[places]
        sampled = inputs.fields[:, places]
        mask_places = np.where(masked >= 0, np.cumsum(masked >= 0) - 1, -1)[places]
        kind = self._choice.fill(sampled, rows.slots[chosen], rows.ends[chosen], mask_places)
        inputs.fields[Field.SLOT :, places] = sampled[Field.SLOT :]
        self._choice.send(rows.slots[chosen])
        for changes in self._changes.fill(inputs.changes):
            self._steps.write_tables(self._steps.upload([changes])[0])
        self._steps.send(inputs)
        return kind

    def _compute_prompts(self, rows: Rows, layout: RowLayout, logprob_counts: Ints, adapters: Resident) -> PromptLogprobColumns:
        left, place = layout.reported, len(layout.decodes)
        if len(layout.prompts):
            own = rows.picked(layout.prompts)
            if self._steps.prompts(own, self._slots, place):
                place += int((own.samples > 0).sum())
            else:
                left = np.concatenate((layout.prompts, layout.reported))
        if not len(left):
            return PromptLogprobColumns()
        own, counts = rows.picked(left), logprob_counts[left]
        positions = sampled_positions(own)
        selected = select_tokens(own, positions, counts)
        hidden = self._steps.forward(*build_batch(own, self._slots, self._steps.upload, selected, adapters))
        if len(positions):
            last = selected.places(positions.tokens)
            wanted = hidden if len(last) == len(hidden) else hidden[self._steps.upload([last])[0]]
            self._steps.put_hidden(wanted, place)
        logprobs = self._prompts.compute(own, counts, selected, hidden)
        logprobs.rows = array("i", left[logprobs.rows].astype(np.int32).tobytes())
        logprobs.failed = {int(left[row]) for row in logprobs.failed}
        return logprobs

    def _launched(
        self, plan: Plan, rows: Rows, layout: RowLayout, kind: ChoiceKind, prompts: PromptLogprobColumns, mask_failures: Mapping[int, str]
    ) -> LaunchedStep:
        sampling = np.flatnonzero(rows.samples)
        place_of = np.zeros(len(rows.slots), dtype=np.int64)
        place_of[layout.chosen] = np.arange(len(layout.chosen))
        step = LaunchedStep(
            self.finish, plan, rows, self._steps.read(len(layout.chosen), is_reported=kind.reported), sampling=sampling,
            places=place_of[sampling], generations=self._generations[rows.slots], num_top=self._choice.num_top(rows.slots[sampling]),
            prompts=prompts, mask_failures=mask_failures,
        )  # fmt: skip
        self._num_in_flight[rows.slots[sampling]] += 1
        self._flight.append(step)
        return step

    # finishing

    def _finish_oldest(self) -> None:
        step = self._flight.popleft()
        slots = step.rows.slots[step.sampling]
        live = slots[self._is_live(step)[step.sampling]]
        self._num_in_flight[live] -= 1
        try:
            step.outcome = self._finish(step)
        except Exception as error:
            self._choice.mark_unsent(live)
            step.outcome = self._reason(error)

    def _is_live(self, step: LaunchedStep) -> NDArray[np.bool_]:
        """[R] whether the row's slot is still held by the step's sequence."""
        is_live: NDArray[np.bool_] = self._generations[step.rows.slots] == step.generations
        return is_live

    def _finish(self, step: LaunchedStep) -> Result:
        step.choices.mark.synchronize()
        failpoint("device.finish")
        slots, ends, sampling = step.rows.slots, step.rows.ends, step.sampling
        sampled = read_chosen(step.choices.chosen.numpy()[:, step.places], step.num_top, self._vocab_size)
        is_live = self._is_live(step)
        errors = row_errors(sampling[sampled.failed], step.prompts, self._slots.failed[slots] & is_live, step.mask_failures)
        is_good = are_good(sampling, errors)
        good = is_live[sampling] & is_good
        kept = sampling[good]
        if (self._slots.known[slots[kept]] != ends[kept]).any():
            raise UnknownToken(f"step {step.plan.step_id} counted on tokens of a step that failed")
        self._state.commit(slots[kept], sampled.token_ids[good], slots[[row for row in errors if is_live[row]]])
        return make_result(step.plan, sampling, is_good, sampled, step.prompts, errors)
