"""Holds a step that a device's runner has launched, until the step is finished, and the layout of its rows."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass

import numpy as np

from headrace.core.plan import Plan, Result
from headrace.engine.runner.batch import Rows
from headrace.engine.runner.device.steps import Choices
from headrace.engine.runner.model_runner import CompletedStep
from headrace.engine.runner.results import PromptLogprobColumns
from headrace.engine.runner.slots import Ints


@dataclass(frozen=True, slots=True)
class RowLayout:
    """How the rows of a plan are computed. Row indices, ascending in the first three columns.

    decodes   rows of one token; replayed from a graph
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
        """logprob_counts: `count_prompt_logprobs` of `rows`."""
        is_reported = logprob_counts > 0
        is_prompt = (rows.counts > 1) & ~is_reported
        decodes, prompts, reported = (np.flatnonzero(mine) for mine in (~is_prompt & ~is_reported, is_prompt, is_reported))
        sampling = [some[rows.samples[some] > 0] for some in (prompts, reported)]
        return cls(decodes, prompts, reported, np.concatenate((decodes, *sampling)))


class LaunchedStep:
    """A step in flight, and its ticket.

    finish         sets the outcome of this step and of those before it
    choices        the device's choices
    sampling       [S] the rows that sample, ascending; places [S]: their places in the choice
    generations    [R] generations of the rows' slots at the launch
    num_top        [S] most likely tokens to list per row; -1: no log-probabilities
    mask_failures  row -> why its grammar cannot go on
    outcome        the result or error; None until finished
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
