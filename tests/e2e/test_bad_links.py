"""Links between a gateway and its engines that flap, or are cut in one direction: no stream fails, and none goes where nothing arrives.

The storm with every fault and real models is `bench/storms/network.py`.
"""

from __future__ import annotations

import asyncio

import pytest
from lateness import tries_while_late

from bench.storms import network
from bench.storms.namespaces import why_not_usable


def test_streams_over_a_link_that_flaps_and_one_that_is_cut_towards_its_engine() -> None:
    faults = ["cut_to_engine", "flapping"]  # in this order: after flapping an engine gets few requests for a while
    for _ in tries_while_late(3):  # a machine that stands still for a second breaks promises in seconds, but no stream
        found = asyncio.run(network.storm(faults, num_engines=2, num_streams=12, seconds=4.0, is_fake=True))
        assert not any(seen["failed"] or seen["different"] for seen in found.values()), found
        broken = list(network.broken_promises(found))
        if not broken:
            break
    assert broken == []
    assert all(seen["streams"] >= 12 for seen in found.values())
    assert found["cut_to_engine"]["first_s"]["max"] > 1.5, "a stream was sent there before it was found out"


@pytest.mark.slow
@pytest.mark.skipif(bool(why_not_usable()), reason=why_not_usable())
def test_streams_between_namespaces_whose_packets_are_dropped() -> None:
    """The kernel's own TCP: acknowledgements are lost with the data. Loss and delay too, where it has `tc netem`."""
    faults = network.faults_of_namespaces()
    found = asyncio.run(network.storm(faults, num_engines=2, num_streams=6, seconds=8.0, is_fake=True, in_namespaces=True))
    assert list(network.broken_promises(found)) == []
    assert {"cut", "cut_to_engine", "cut_to_gateway"} <= set(found)
