"""Says how one replica is divided over ranks (processes), and which divisions this version runs."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import NamedTuple

MOST = 64

AUTO = "auto"
"""The planner decides how many ranks share each layer (`lab.plan.here`)."""


def why_indivisible(tp: int, *, heads: int, kv_heads: int, features: Iterable[int], vocab_size: int) -> str:
    """Empty: layers of these sizes divide into `tp` parts. features: of feed-forward blocks, or of each expert that is not left whole"""
    if (tp - 1) * -(-vocab_size // tp) >= vocab_size:
        return f"a vocabulary of {vocab_size} leaves the last of as many parts empty"
    if heads % tp:
        return f"{heads} query heads do not divide by it"
    if kv_heads % tp and tp % kv_heads:
        return f"{kv_heads} KV heads neither divide by it nor divide it"
    odd = next((size for size in features if size % tp), 0)
    return f"{odd} features of a feed-forward block do not divide by it" if odd else ""


@dataclass(frozen=True, slots=True)
class Parallelism:
    """
    tp  ranks that share each layer (tensor parallel)
    pp  stages, each with its part of the layers (pipeline parallel)
    ep  whole experts are divided over the ranks of a stage, instead of a part of each
    is_apart  each stage has memory of its own: that of a machine, or of a GPU
    """

    tp: int = 1
    pp: int = 1
    ep: bool = False
    is_apart: bool = field(default=False, repr=False)

    @property
    def world(self) -> int:
        return self.tp * self.pp

    @property
    def num_here(self) -> int:
        """Ranks that share this one's memory."""
        return self.tp if self.is_apart else self.world

    def why_not_planned(self, device: str, num_machines: int = 1) -> str:
        """Empty: a planner may choose it. device: "cpu" or "cuda"."""
        if self.world == 1:
            return ""
        if device != "cpu":
            return "replicas on several GPUs are not planned"
        return "" if num_machines == 1 else "headrace serve starts all ranks of a replica on one machine"

    def place(self, rank: int) -> Place:
        return Place(self, rank % self.tp, self.pp - 1 - rank // self.tp)


@dataclass(frozen=True, slots=True)
class Place:
    """Rank 0 leads: it has the loop and the scheduler, and it is in the last stage, whose head gives the logits.

    tp_rank  within its stage
    stage    0 has the embedding
    """

    parallelism: Parallelism = Parallelism()
    tp_rank: int = 0
    stage: int = 0

    @property
    def rank(self) -> int:
        return (self.parallelism.pp - 1 - self.stage) * self.parallelism.tp + self.tp_rank

    @property
    def is_first(self) -> bool:
        return self.stage == 0

    @property
    def is_last(self) -> bool:
        return self.stage == self.parallelism.pp - 1

    def layers(self, num_layers: int) -> range:
        """The stage's own: consecutive, as equal in number as they can be, earlier stages having one more."""
        each, more = divmod(num_layers, self.parallelism.pp)
        first = self.stage * each + min(self.stage, more)
        return range(first, first + each + (self.stage < more))


ALONE = Place()


class RankWork(NamedTuple):
    """What one rank has done since it started.

    num_exchanges  in which it took part; a large tensor takes several
    num_bytes      that it wrote for others
    waited_s       in exchanges; link_waited_s: of these for another stage
    steps_s        in its part of steps, with what it waited there; 0 for rank 0
    """

    num_exchanges: int
    num_bytes: int
    waited_s: float
    link_waited_s: float
    steps_s: float
