"""What the layers of one rank ask of the other ranks of their replica (`core.parallelism`)."""

from __future__ import annotations

from typing import ClassVar, Protocol

from torch import Tensor

from headrace.core.parallelism import RankWork


class Peers(Protocol):
    """Every rank of a stage calls `reduce`, `gather` and `broadcast` in the same order, with tensors of equal shape and dtype; each `send`
    meets the `receive` of the same place in the next stage. Sums are equal on every rank, to the bit.

    All raise EngineFatal once a rank of the replica has ended, or `abort` was called.
    """

    def reduce(self, x: Tensor) -> Tensor:
        """The sum over the stage's ranks, in the order of their ranks; x may be overwritten."""
        ...

    def gather(self, x: Tensor) -> Tensor:
        """[N, v] of each rank of the stage -> [N, tp * v] on the first, side by side in the order of ranks; [0, tp * v] on the others."""
        ...

    def broadcast(self, x: Tensor) -> None:
        """Overwrites x with that of the stage's first rank."""
        ...

    def send(self, x: Tensor) -> None: ...

    def receive(self, x: Tensor) -> None:
        """Overwrites x."""
        ...

    def note_step(self, nanoseconds: int) -> None:
        """That this rank's part of a step took."""
        ...

    def work(self) -> list[RankWork]:
        """That all ranks have done, in their order."""
        ...

    def abort(self) -> None:
        """From any thread: the calls that wait, on all ranks, and later ones raise EngineFatal."""
        ...

    def close(self) -> None:
        """As `abort`, and what it holds is given back."""
        ...


class NoPeers:
    """For a replica of one rank."""

    runs_only_kernels: ClassVar = True

    def reduce(self, x: Tensor) -> Tensor:
        return x

    def gather(self, x: Tensor) -> Tensor:
        return x

    def broadcast(self, x: Tensor) -> None:
        pass

    def send(self, x: Tensor) -> None:
        raise AssertionError("one stage sends nothing")

    def receive(self, x: Tensor) -> None:
        raise AssertionError("one stage receives nothing")

    def note_step(self, nanoseconds: int) -> None:
        pass

    def work(self) -> list[RankWork]:
        return []

    def abort(self) -> None:
        pass

    def close(self) -> None:
        self.abort()


NO_PEERS = NoPeers()
