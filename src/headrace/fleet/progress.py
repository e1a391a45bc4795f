"""Passes on the progress of changes to a deployment, as lines for people. Each line is about one model. It goes to the log and to that
model's commands.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Collection, Iterator
from contextlib import contextmanager
from dataclasses import dataclass

log = logging.getLogger(__name__)

Hear = Callable[[str], None]
"""Takes a line for the operator of one command."""


@dataclass(frozen=True, slots=True)
class ModelProgress:
    model: str
    text: str
    level: int = logging.INFO


class Progress:
    """Passes progress lines to the listeners for their model."""

    def __init__(self) -> None:
        self._listeners: list[tuple[Hear, Collection[str]]] = []

    @contextmanager
    def heard(self, hear: Hear, models: Collection[str]) -> Iterator[None]:
        """While the block runs, `hear` gets every line about these models."""
        listener = hear, models
        self._listeners.append(listener)
        try:
            yield
        finally:
            self._listeners.remove(listener)

    def say(self, line: ModelProgress) -> None:
        log.log(line.level, "%s", line.text)
        for hear, models in [*self._listeners]:
            if line.model in models:
                hear(line.text)


def no_operator(text: str) -> None:
    """Ignores a line: for a command whose lines go to the log alone."""
