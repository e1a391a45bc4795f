"""Says over how many devices this version runs one replica."""

from __future__ import annotations

MOST = 64


def why_not_run(tp: int = 1, pp: int = 1) -> str:
    """Empty: this version runs such a replica. tp: devices of each layer; pp: groups of layers."""
    if tp * pp == 1:
        return ""
    return "this version runs a replica on one device"


RUN_TP = tuple(tp for tp in range(1, MOST + 1) if not why_not_run(tp))
RUN_PP = tuple(pp for pp in range(1, MOST + 1) if not why_not_run(1, pp))
