"""Tests which engines are found in a Service's EndpointSlices."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from kube_kit import endpoint, slice_of

from headrace.fleet.kubernetes.endpoints import EngineEndpoint, engines_of, has_port

pytestmark = pytest.mark.pure


def found(*slices: dict[str, Any], known: tuple[EngineEndpoint, ...] = ()) -> list[tuple[str, str]]:
    return [(engine.name, engine.address) for engine in engines_of(slices, "engine", known)]


def test_slices_are_one_list_of_pods_with_the_port_of_each_slice() -> None:
    one, two = slice_of(endpoint("e-1", "10.0.0.2"), endpoint("e-0", "10.0.0.1")), slice_of(endpoint("e-2", "10.0.1.1"), port=7002)
    assert found(one, two) == [("e-0", "10.0.0.1:7001"), ("e-1", "10.0.0.2:7001"), ("e-2", "10.0.1.1:7002")]


def test_a_pod_that_is_not_ready_yet_or_leaves_is_not_used() -> None:
    starting, leaving = endpoint("e-0", "10.0.0.1", ready=False), endpoint("e-1", "10.0.0.2", ready=True, terminating=True)
    assert found(slice_of(starting, leaving)) == []


def test_a_condition_that_is_absent_counts_as_ready() -> None:
    bare = {"addresses": ["10.0.0.1"], "targetRef": {"name": "e-0"}}
    assert found(slice_of(bare, endpoint("e-1", "10.0.0.2", ready=None))) == [("e-0", "10.0.0.1:7001"), ("e-1", "10.0.0.2:7001")]


def test_a_pod_in_use_stays_while_it_is_listed_although_it_is_not_ready() -> None:
    known = (EngineEndpoint("e-0", "10.0.0.1:7001"),)
    unready = endpoint("e-0", "10.0.0.1", ready=False)
    assert found(slice_of(unready), known=known) == [("e-0", "10.0.0.1:7001")]
    assert found(slice_of(), known=known) == []
    assert found(slice_of(endpoint("e-0", "10.0.0.9", ready=False)), known=known) == [], "another pod of this name"


def test_a_pod_that_has_its_name_anew_takes_the_place_of_the_one_that_leaves() -> None:
    old, new = endpoint("e-0", "10.0.0.1", terminating=True), endpoint("e-0", "10.0.0.7")
    known = (EngineEndpoint("e-0", "10.0.0.1:7001"),)
    assert found(slice_of(old), slice_of(new), known=known) == [("e-0", "10.0.0.7:7001")]


def test_an_endpoint_that_two_slices_have_counts_once_and_leaves_where_either_says_so() -> None:
    here, there = endpoint("e-0", "10.0.0.1"), endpoint("e-0", "10.0.0.1", terminating=True)
    assert found(slice_of(here), slice_of(here)) == [("e-0", "10.0.0.1:7001")]
    assert found(slice_of(here), slice_of(there)) == found(slice_of(there), slice_of(here)) == []


def test_a_pod_with_two_addresses_is_used_at_its_ipv4_address() -> None:
    six, four = slice_of(endpoint("e-0", "fd00::1"), kind="IPv6"), slice_of(endpoint("e-0", "10.0.0.1"))
    assert found(six, four) == [("e-0", "10.0.0.1:7001")]
    assert found(six) == [("e-0", "[fd00::1]:7001")]


def test_what_is_no_pod_has_its_address_for_a_name_and_a_name_for_an_address_is_nothing() -> None:
    bare = {"addresses": ["fd00::1"], "conditions": {"ready": True}}
    named = {"addresses": ["engine.example"], "conditions": {"ready": True}}
    assert found(slice_of(bare, kind="IPv6"), slice_of(named, kind="FQDN")) == [("fd00--1", "[fd00::1]:7001")]


def test_a_port_of_another_name_is_no_port_of_engines() -> None:
    other = slice_of(endpoint("e-0", "10.0.0.1"), port_name="http")
    assert found(other) == []
    assert not has_port([other], "engine")
    assert has_port([other, slice_of(endpoint("e-1", "10.0.0.2"))], "engine")
    assert has_port([{**slice_of(), "ports": None, "endpoints": None}], "engine"), "a Service without a pod"


PODS = st.builds(
    endpoint,
    st.sampled_from(["e-0", "e-1", "e-2"]),
    st.sampled_from(["10.0.0.1", "10.0.0.2", "10.0.0.3"]),
    ready=st.sampled_from([True, False, None]),
    terminating=st.booleans(),
)


@given(st.lists(PODS, max_size=8), st.lists(st.integers(0, 3), min_size=8, max_size=8), st.randoms(use_true_random=False))
def test_how_pods_lie_in_slices_changes_nothing(pods: list[dict[str, Any]], places: list[int], random: Any) -> None:
    known = (EngineEndpoint("e-0", "10.0.0.1:7001"),)
    whole = engines_of([slice_of(*pods)], "engine", known)
    parts = [slice_of(*(pod for pod, place in zip(pods, places, strict=False) if place == number)) for number in range(4)]
    random.shuffle(parts)
    assert engines_of(parts, "engine", known) == whole
    assert len({engine.name for engine in whole}) == len({engine.address for engine in whole}) == len(whole)
    leaving = {(pod["targetRef"]["name"], f"{pod['addresses'][0]}:7001") for pod in pods if pod["conditions"]["terminating"]}
    assert not leaving & {(engine.name, engine.address) for engine in whole}
