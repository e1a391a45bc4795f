"""Links between a gateway and its engines that flap, or are cut in one direction: no stream fails, and none goes where nothing arrives.

The storm with every fault and real models is `bench/storms/network.py`.
"""

from __future__ import annotations

import asyncio

from bench.storms import network


def test_streams_over_a_link_that_flaps_and_one_that_is_cut_towards_its_engine() -> None:
    faults = ["flapping", "cut_to_engine"]
    found = asyncio.run(network.storm(faults, num_engines=2, num_streams=6, seconds=4.0, is_fake=True))
    assert list(network.broken_promises(found)) == []
    assert all(seen["streams"] > 6 for seen in found.values())
    assert found["cut_to_engine"]["first_s"]["max"] > 1.5, "a stream was sent there before it was found out"
