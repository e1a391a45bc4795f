"""A launched step of a device's runner, until its end, and the layout of its rows."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass

import numpy as np

from headrace.core.plan import Plan, Result
from headrace.engine.runner import CompletedStep
from headrace.engine.runner_batch import Rows
from headrace.engine.runner_device_steps import Choices
from headrace.engine.runner_results import PromptLogprobColumns
from headrace.engine.runner_slots import Ints


@dataclass(frozen=True, slots=True)
class RowLayout:
    """How a plan's rows are computed; indices of rows, ascending in the first three columns.

    decodes   rows of one token that are replayed
    prompts   the rest, but for
    reported  rows of prompts whose log-probabilities are asked for: all their hidden states are needed, so they are not replayed
    chosen    rows with a place in the choice: those of the three columns in this order, but for prompts that do not sample
    """

    decodes: Ints
    prompts: Ints
    reported: Ints
    chosen: Ints

    @classmethod
    def of(cls, rows: Rows, logprob_counts: Ints) -> RowLayout:
        """logprob_counts: `count_prompt_logprobs` of `rows`."""
        is_reported = logprob_counts > 0
        is_prompt = (rows.counts > 1) & ~is_reported
        decodes, prompts, reported = (np.flatnonzero(mine) for mine in (~is_prompt & ~is_reported, is_prompt, is_reported))
        sampling = [some[rows.samples[some] > 0] for some in (prompts, reported)]
        return cls(decodes, prompts, reported, np.concatenate((decodes, *sampling)))


class LaunchedStep:
    """A step in flight, and its ticket.

    finish         gives it, and those before it, their outcomes
    choices        what the device chose
    sampling       [S] the rows that sample, ascending; places [S] theirs in the choice
    generations    [R] those of the rows' slots when it was launched
    num_top        [S] most likely tokens that each lists; -1: none
    mask_failures  row -> why its grammar cannot go on
    outcome        once it is finished
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
        self.outcome: Result | Exception | None = None

    def result(self) -> Result:
        """Wait for this step, and finish those before it."""
        self._finish(self)
        assert self.outcome is not None
        return CompletedStep(self.outcome).result()
