"""Copies idle cached blocks to slots in host memory, and back when a prompt begins with them.

    cached block, idle for idle_s --HOST_OUT under a lease--> stored in a host slot; the block stays cached until it is needed
    prompt that begins with stored blocks --HOST_IN under a lease--> cached blocks; the sequence waits meanwhile, as for a prerequisite

A sequence never depends on its transfer: it computes its prompt when blocks are short, when the transfer's time is over, or when its
slots were needed. No engine is composed with a tier, since no runner but the simulator's has memory to move blocks to.
"""

from __future__ import annotations

from collections import Counter, OrderedDict
from collections.abc import Iterable
from dataclasses import dataclass, field
from itertools import takewhile

from headrace.core.hashing import BlockHash
from headrace.core.plan import MoveKind
from headrace.policy.kvcache.leases import Lease
from headrace.policy.kvcache.manager import KvManager
from headrace.policy.sequence import SeqState, Sequence
from headrace.policy.step_builder import StepBuilder

GROUP = 0


@dataclass(slots=True)
class _Out:
    identity: BlockHash
    slot: int


@dataclass(slots=True)
class _In:
    identities: list[BlockHash]
    slots: list[int]
    waiting: Sequence | None


@dataclass(slots=True)
class TierCounters:
    blocks_out: int = 0
    blocks_in: int = 0
    waits_given_up: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class HostTierConfig:
    """idle_s     a block unused for this long is copied out
    max_outs   blocks copied out at once; none of them can be evicted meanwhile
    """

    num_slots: int
    idle_s: float = 1.0
    lease_s: float = 10.0
    max_outs: int = 4


@dataclass(slots=True)
class _Slots:
    """stored   identity -> slot that holds it, roughly the least recently used first
    readers  slot -> number of transfers that read it; a slot that is read is not reused
    """

    free: list[int]
    stored: OrderedDict[BlockHash, int] = field(default_factory=OrderedDict)
    used_at: dict[int, float] = field(default_factory=dict)
    readers: Counter[int] = field(default_factory=Counter)

    def take(self, used_at: float) -> int | None:
        """A block does not replace one of the same age: two such blocks would replace each other for ever."""
        if self.free:
            return self.free.pop()
        identity = next((identity for identity, slot in self.stored.items() if not self.readers[slot]), None)
        if identity is None or self.used_at[self.stored[identity]] >= used_at:
            return None
        return self.stored.pop(identity)


class HostTier:
    def __init__(self, kv: KvManager, config: HostTierConfig) -> None:
        if len(kv.groups) != 1 or kv.groups[GROUP].window is not None:
            raise ValueError("a host tier needs exactly one KV group, without a window")
        self.kv = kv
        self.config = config
        self.counters = TierCounters()
        self._pool = kv.pools[GROUP]
        self._slots = _Slots(list(range(config.num_slots - 1, -1, -1)))
        self._outs: dict[Lease, _Out] = {}
        self._ins: dict[Lease, _In] = {}
        self._asking: list[Sequence] = []

    # what a sequence waits for

    def fetch(self, seq: Sequence) -> bool:
        if seq.needs_prompt_logprobs or any(seq.blocks) or not self._stored_after_hits(seq):
            return False
        self._asking.append(seq)
        return True

    def _stored_after_hits(self, seq: Sequence) -> list[BlockHash]:
        if not self._slots.stored:
            return []
        stored: list[BlockHash] = []
        for identity in self.kv.hashes_after_hits(seq):
            if self._pool.find(identity) is None:
                if identity not in self._slots.stored:
                    break
                stored.append(identity)
        return stored

    # what moves

    def plan(self, step: StepBuilder, now: float) -> list[Sequence]:
        """Returns sequences that need not wait any more."""
        ready = self._give_up_overdue()
        asking, self._asking = self._asking, []
        ready += [seq for seq in asking if seq.state is SeqState.BLOCKED and not self._begin_in(seq, step, now)]
        self._begin_outs(step, now)
        return ready

    def _give_up_overdue(self) -> list[Sequence]:
        ready = []
        for lease, move in self._ins.items():
            if lease.is_overdue and move.waiting is not None:
                ready.append(move.waiting)
                move.waiting = None
        self.counters.waits_given_up += len(ready)
        return ready

    def _begin_in(self, seq: Sequence, step: StepBuilder, now: float) -> bool:
        identities = self._stored_after_hits(seq)
        if not identities:
            return False
        prompt = self.kv.hashes_before(seq, identities[-1])
        if len(identities) > self._pool.num_available - self._pool.num_idle_hits(prompt):
            return False
        # Blocks copied in extend the prefix that the device holds: none of its blocks may be evicted to make room.
        self._pool.touch([block for identity in prompt if (block := self._pool.find(identity)) is not None])
        lease = self.kv.leases.lease_fresh(GROUP, len(identities), "host in", now + self.config.lease_s)
        slots = [self._slots.stored[identity] for identity in identities]
        for identity, slot, block in zip(identities, slots, lease.blocks, strict=True):
            self._slots.readers[slot] += 1
            self._slots.stored.move_to_end(identity)
            self._slots.used_at[slot] = now
            step.move(MoveKind.HOST_IN, self.kv.leases.begin_move(lease), GROUP, slot, block)
        self._ins[lease] = _In(identities, slots, seq)
        return True

    def _begin_outs(self, step: StepBuilder, now: float) -> None:
        for block, last_used in self._idle_blocks(now):
            if len(self._outs) >= self.config.max_outs:
                return
            slot = self._slots.take(last_used)
            if slot is None:
                continue  # a later block of the list is newer, and may replace an older one's slot
            self._slots.used_at[slot] = last_used
            identity = self._pool.identity(block)
            assert identity is not None, "a cached block has an identity"
            lease = self.kv.leases.lease(GROUP, [block], "host out", now + self.config.lease_s)
            step.move(MoveKind.HOST_OUT, self.kv.leases.begin_move(lease), GROUP, block, slot)
            self._outs[lease] = _Out(identity, slot)

    def _idle_blocks(self, now: float) -> list[tuple[int, float]]:
        known = {*self._slots.stored, *(move.identity for move in self._outs.values())}
        old = takewhile(lambda entry: now - entry[1] >= self.config.idle_s, self._pool.idle_since())
        return [(block, last_used) for block, last_used in old if self._pool.identity(block) not in known]

    # what has moved

    def moves_done(self, leases: Iterable[Lease]) -> list[Sequence]:
        ready: list[Sequence] = []
        for lease in leases:
            if lease in self._outs:
                self._end_out(self._outs.pop(lease))
            else:
                ready += self._end_in(lease, self._ins.pop(lease))
            self.kv.leases.release(lease)
        return ready

    def _end_out(self, move: _Out) -> None:
        self._slots.stored[move.identity] = move.slot
        self.counters.blocks_out += 1

    def _end_in(self, lease: Lease, move: _In) -> list[Sequence]:
        for identity, slot, block in zip(move.identities, move.slots, lease.blocks, strict=True):
            self._pool.register(block, identity)
            self._slots.readers[slot] -= 1
        self.counters.blocks_in += len(move.identities)
        return [] if move.waiting is None else [move.waiting]

    # invariants

    def check(self) -> None:
        held = self._slots
        slots = [*held.free, *held.stored.values(), *(move.slot for move in self._outs.values())]
        assert sorted(slots) == list(range(self.config.num_slots)), "a host slot was lost, or is in two places"
        assert all(lease.moves for lease in (*self._outs, *self._ins)), "a transfer without a move in flight"
        readers = Counter(slot for move in self._ins.values() for slot in move.slots)
        assert +held.readers == readers, "a slot is read and not counted"
        assert readers.keys() <= {*held.stored.values()}, "a slot that is being read was given away"
