"""Tests whose failures a server's failures are."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from headrace.policy.routing.tenant_failures import OTHERS_S, TenantFailures

pytestmark = pytest.mark.pure


def test_failures_of_one_tenant_are_its_own_while_another_is_answered() -> None:
    failures = TenantFailures()
    failures.answered(b"beta", 0.0)
    assert all(failures.is_tenants(b"acme", now) for now in (1.0, 2.0, OTHERS_S - 0.1))
    assert not failures.is_tenants(b"acme", OTHERS_S), "the answer is too old"


def test_failures_of_two_tenants_are_the_servers_until_it_answers() -> None:
    failures = TenantFailures()
    for tenant in (b"acme", b"beta", b"third"):
        failures.answered(tenant, 0.0)
    assert failures.is_tenants(b"acme", 1.0)
    assert not failures.is_tenants(b"beta", 1.0)
    assert not failures.is_tenants(b"acme", 1.0)
    failures.answered(b"third", 2.0)
    assert failures.is_tenants(b"acme", 3.0)


@given(steps=st.lists(st.booleans()))
def test_failures_of_the_only_tenant_are_the_servers(steps: list[bool]) -> None:
    failures = TenantFailures()
    for number, is_answered in enumerate(steps):
        if is_answered:
            failures.answered(b"only", float(number))
        else:
            assert not failures.is_tenants(b"only", float(number))
