"""Embedding tables: the protocol of a lookup of rows by token id, and the table that is a tensor in memory (`HeldTable`)."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

from torch import Tensor
from torch.nn import functional as F


class Table(Protocol):
    """[rows, columns]. resident_bytes: memory of this process that the table takes."""

    @property
    def resident_bytes(self) -> int: ...

    def rows(self, ids: Tensor) -> Tensor:
        """ids [T] int64, each below the number of rows -> [T, columns], a new tensor."""
        ...

    def whole(self) -> Tensor:
        """[rows, columns], in memory."""
        ...


@dataclass(frozen=True, slots=True)
class HeldTable:
    tensor: Tensor

    @property
    def resident_bytes(self) -> int:
        return self.tensor.nbytes

    def rows(self, ids: Tensor) -> Tensor:
        return F.embedding(ids, self.tensor)

    def whole(self) -> Tensor:
        return self.tensor
