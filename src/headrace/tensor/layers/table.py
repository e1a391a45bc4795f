"""Embedding tables: rows that are looked up by token id, in memory or in the file of packed weights."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

from torch import Tensor
from torch.nn import functional as F


class Table(Protocol):
    """Rows [rows, columns].

    resident_bytes  of it in memory
    """

    @property
    def resident_bytes(self) -> int: ...

    def rows(self, ids: Tensor) -> Tensor:
        """ids [T] int64, each below the number of rows -> [T, columns], a new tensor."""
        ...

    def whole(self) -> Tensor:
        """All rows, in memory."""
        ...


@dataclass(frozen=True, slots=True)
class HeldTable:
    """In memory."""

    tensor: Tensor

    @property
    def resident_bytes(self) -> int:
        return self.tensor.nbytes

    def rows(self, ids: Tensor) -> Tensor:
        return F.embedding(ids, self.tensor)

    def whole(self) -> Tensor:
        return self.tensor
