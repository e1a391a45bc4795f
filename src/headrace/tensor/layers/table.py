"""Embedding tables, whose rows are looked up by token id. `HeldTable` is in memory; `packed.store.StoredTable` stays in its file."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

from torch import Tensor
from torch.nn import functional as F


class Table(Protocol):
    """A table [rows, columns]. resident_bytes: memory that it takes in this process."""

    @property
    def resident_bytes(self) -> int: ...

    def rows(self, ids: Tensor) -> Tensor:
        """ids [T] int64, each below the number of rows -> [T, columns], a new tensor."""
        ...

    def whole(self) -> Tensor:
        """The whole table, in memory."""
        ...


@dataclass(frozen=True, slots=True)
class HeldTable:
    """A table in memory."""

    tensor: Tensor

    @property
    def resident_bytes(self) -> int:
        return self.tensor.nbytes

    def rows(self, ids: Tensor) -> Tensor:
        return F.embedding(ids, self.tensor)

    def whole(self) -> Tensor:
        return self.tensor
