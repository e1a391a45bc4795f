"""Tests links between a gateway and its engines whose packets the kernel drops: no stream fails, and no request goes to a dead link.

Links that are cut in either direction or flap, through a proxy and on every run: tests/gateway/upstream/own/test_dead_replicas.py.
The storm with every fault and real models is `bench/storms/network.py`.
"""

from __future__ import annotations

import asyncio

import pytest

from bench.storms import network
from bench.storms.namespaces import why_not_usable


@pytest.mark.slow
@pytest.mark.process
@pytest.mark.skipif(bool(why_not_usable()), reason=why_not_usable())
def test_streams_between_namespaces_whose_packets_are_dropped() -> None:
    """The kernel's own TCP: acknowledgements are lost with the data. Loss and delay too, where it has `tc netem`."""
    faults = network.faults_of_namespaces()
    found = asyncio.run(network.storm(faults, num_engines=2, num_streams=6, seconds=8.0, is_fake=True, in_namespaces=True))
    assert list(network.broken_promises(found)) == []
    assert {"cut", "cut_to_engine", "cut_to_gateway"} <= set(found)
