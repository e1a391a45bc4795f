"""Tells whether this process is a fork of one that runs an engine: it has copies of its parent's objects and none of its threads, for
which an engine and OpenMP would wait for ever. Processes made by "spawn" or "forkserver" are no forks in this sense.
"""

from __future__ import annotations

import os
from socket import socket
from weakref import WeakSet

from headrace.core.errors import HeadraceError


class ForkedProcess(HeadraceError, RuntimeError):
    def __init__(self) -> None:
        super().__init__(
            "this process was forked from one that has made an LLM, and threads do not survive a fork. Start it with "
            'multiprocessing.get_context("spawn"), or before the first LLM is made, and make its own LLM in it.'
        )


class Forks:
    """
    count       forks between the process that imported this module and this one
    engines_at  the count where the first engine was made; None: there was none yet
    """

    def __init__(self) -> None:
        self.count = 0
        self.engines_at: int | None = None
        self._parents: WeakSet[socket] = WeakSet()
        os.register_at_fork(after_in_child=self.add)

    def add(self) -> None:
        self.count += 1
        for parents in [*self._parents]:
            parents.close()

    def close_in_forks(self, end: socket) -> None:
        """For a socket whose other end must see that this process is gone, whatever forks it has left."""
        self._parents.add(end)

    def begin_engine(self) -> None:
        """Raises ForkedProcess in a fork of a process that has made an engine, whether or not that engine still runs."""
        if self.engines_at is None:
            self.engines_at = self.count
        elif self.engines_at != self.count:
            raise ForkedProcess


FORKS = Forks()
