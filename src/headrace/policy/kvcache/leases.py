"""Tracks the blocks that transfers own: each transfer holds a lease with a time limit.

    lease --begin_move--> moves in flight --moves_done--> the last one done --release--> its blocks are dropped
      `-- expire: the time is over --> nothing in flight: released at once
                                   `-> moves in flight: overdue, still the owner

An overdue lease ends when the runner reports its moves, or with the engine: a block that a transfer may still read or write is never
given to another owner.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

from headrace.core.errors import EngineFatal
from headrace.policy.kvcache.pool import PAD_BLOCK, BlockPool

MAX_MOVE_ID = 2**31 - 1


class LeaseError(EngineFatal):
    """A bug of ours: going on could give a block to two owners."""


@dataclass(slots=True, eq=False)
class Lease:
    """A transfer's hold on blocks of one KV group.

    deadline  in seconds, on the scheduler's clock
    """

    owner: str
    group: int
    blocks: tuple[int, ...]
    deadline: float
    moves: set[int] = field(default_factory=set)
    is_overdue: bool = False


class Leases:
    def __init__(self, pools: Sequence[BlockPool]) -> None:
        self._pools = pools
        self._leases: dict[Lease, None] = {}
        self._moves: dict[int, Lease] = {}
        self._last_move_id = 0

    # questions

    def __len__(self) -> int:
        return len(self._leases)

    @property
    def has_moves(self) -> bool:
        return any(lease.moves and not lease.is_overdue for lease in self._leases)

    def num_overdue_blocks(self, group: int) -> int:
        return sum(len(lease.blocks) for lease in self._leases if lease.is_overdue and lease.group == group)

    def is_in_flight(self, move_id: int) -> bool:
        return move_id in self._moves

    # changes

    def lease(self, group: int, blocks: Iterable[int], owner: str, deadline: float) -> Lease:
        """A lease does not count as a use, so the blocks' age stays."""
        lease = Lease(owner, group, tuple(blocks), deadline)
        for block in lease.blocks:
            self._pools[group].lend(block)
        self._leases[lease] = None
        return lease

    def lease_fresh(self, group: int, count: int, owner: str, deadline: float) -> Lease:
        """The caller asked `num_available` first."""
        pool = self._pools[group]
        lease = Lease(owner, group, tuple(pool.take() for _ in range(count)), deadline)
        self._leases[lease] = None
        return lease

    def begin_move(self, lease: Lease) -> int:
        self._require(lease)
        if len(self._moves) >= MAX_MOVE_ID:
            raise LeaseError("every move id is in flight")
        while True:
            self._last_move_id = self._last_move_id % MAX_MOVE_ID + 1
            if self._last_move_id not in self._moves:
                break
        lease.moves.add(self._last_move_id)
        self._moves[self._last_move_id] = lease
        return self._last_move_id

    def moves_done(self, move_ids: Iterable[int]) -> list[Lease]:
        """Returns the leases whose last move ended; the caller releases them."""
        finished: list[Lease] = []
        for move_id in move_ids:
            lease = self._moves.pop(move_id, None)
            if lease is None:
                raise LeaseError(f"move {move_id} was reported done, and is not in flight")
            lease.moves.remove(move_id)
            if not lease.moves:
                finished.append(lease)
        return finished

    def release(self, lease: Lease) -> None:
        """A block is reusable once no sequence owns it and no uncommitted plan names it."""
        self._require(lease)
        if lease.moves:
            raise LeaseError(f"the lease of {lease.owner} on blocks {lease.blocks} was released with moves in flight: {lease.moves}")
        del self._leases[lease]
        for block in reversed(lease.blocks):
            self._pools[lease.group].drop(block)

    def expire(self, now: float) -> None:
        for lease in [lease for lease in self._leases if lease.deadline <= now]:
            if lease.moves:
                lease.is_overdue = True
            else:
                self.release(lease)

    def _require(self, lease: Lease) -> None:
        if lease not in self._leases:
            raise LeaseError(f"the lease of {lease.owner} on blocks {lease.blocks} is over, or was never made")

    # invariants

    def check(self) -> None:
        for lease in self._leases:
            assert PAD_BLOCK not in lease.blocks, "the pad block is leased"
            assert all(self._moves.get(move_id) is lease for move_id in lease.moves), "a move in flight whose end would not reach its lease"
        assert sum(len(lease.moves) for lease in self._leases) == len(self._moves), "a move without a lease"

    def owned(self, group: int) -> Counter[int]:
        return Counter(block for lease in self._leases if lease.group == group for block in lease.blocks)
