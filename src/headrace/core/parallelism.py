"""Says over how many devices this version runs one replica. The commands that start engines, the Python API and the planner ask here."""

from __future__ import annotations

MOST = 64
"""Most devices of one replica that are asked about."""


def why_not_run(tp: int = 1, pp: int = 1) -> str:
    """Why this version runs no replica of `tp` x `pp` devices; empty where it runs one. tp: devices of each layer; pp: groups of layers"""
    if tp * pp == 1:
        return ""
    return "this version runs a replica on one device"


RUN_TP = tuple(tp for tp in range(1, MOST + 1) if not why_not_run(tp))
RUN_PP = tuple(pp for pp in range(1, MOST + 1) if not why_not_run(1, pp))
