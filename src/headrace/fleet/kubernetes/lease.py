"""Lets one gateway pod of several decide, by a Lease that it renews.

Clocks of machines are not compared: a Lease has ended when it was seen not to change for its whole length. Its holder counts it as lost
well before that.
"""

from __future__ import annotations

import asyncio
import json
import logging
import random
from contextlib import suppress
from dataclasses import astuple
from datetime import UTC, datetime
from typing import Any

from headrace.fleet.kubernetes.api import CONFLICT, NOT_FOUND, ApiResource, KubernetesApi, KubernetesFailed, KubernetesObject
from headrace.policy.scaling.budget import DayUse

log = logging.getLogger(__name__)

LEASES = ApiResource("coordination.k8s.io", "leases")

LEASE_S, HELD_S, RENEW_S = 15, 10.0, 4.0
"""A Lease's length, how long a renewal counts for its holder, and the time between two renewals."""

GIVE_UP_S = 2.0

USE = "headrace/use-of-day"
"""Annotation of a Lease."""


class LeaderLease:
    """identity: unlike that of every other pod, also of an earlier one of its name; failure: why it cannot be asked for

    use  of the day by what its holder scales, as this pod counts it while it holds the Lease, else as it was last read; None: not known
    """

    def __init__(self, api: KubernetesApi, namespace: str, name: str, identity: str) -> None:
        self._api, self._namespace, self._name, self._identity = api, namespace, name, identity
        self._clock = asyncio.get_running_loop().time
        self._held_until = -1.0
        self._seen: tuple[object, ...] = ()
        self._seen_at = 0.0
        self.failure = ""
        self.use: DayUse | None = None

    @property
    def is_held(self) -> bool:
        return self._clock() < self._held_until

    @property
    def was_read(self) -> bool:
        return bool(self._seen)

    async def run(self) -> None:
        """Renews it, or waits for its end, until cancelled; then it is given up."""
        try:
            while True:
                failure = ""
                try:
                    await self._renew()
                except KubernetesFailed as error:
                    if error.status != CONFLICT:  # of two pods that asked at once the other one has it
                        failure = str(error)
                except Exception as error:  # the outermost loop: an answer that is no Lease must not end it
                    failure = f"it is no Lease: {error!r}"
                if failure and failure != self.failure:
                    log.error("the Lease %s cannot be held, so that this pod scales nothing: %s", self._name, failure)
                self.failure = failure
                await asyncio.sleep(RENEW_S * random.uniform(0.8, 1.0))
        finally:
            await self._give_up()

    async def _renew(self) -> None:
        began = self._clock()
        try:
            lease = await self._api.call("get", LEASES, self._namespace, self._name)
        except KubernetesFailed as error:
            if error.status != NOT_FOUND:
                raise
            await self._api.call("create", LEASES, self._namespace, body=self._made({"metadata": {"name": self._name}}))
            self._hold(began)
            return
        spec: dict[str, Any] = lease.get("spec") or {}
        holder, seen = spec.get("holderIdentity"), (spec.get("holderIdentity"), spec.get("renewTime"), spec.get("leaseTransitions"))
        if holder != self._identity:
            self.use = _use_in(lease)
        now = self._clock()
        if seen != self._seen:  # counted from the answer on: its holder may have renewed it at any time before that
            self._seen, self._seen_at = seen, now
        if holder and holder != self._identity and now < self._seen_at + float(spec.get("leaseDurationSeconds") or LEASE_S):
            self._held_until = -1.0
            return
        await self._api.call("update", LEASES, self._namespace, self._name, self._made(lease))
        self._hold(began)

    def _hold(self, began: float) -> None:
        """Counted from before the call: another pod counts from when it has seen the renewal."""
        if not self.is_held:
            log.info("this pod holds the Lease %s: it scales", self._name)
        self._held_until = began + HELD_S

    def _made(self, lease: KubernetesObject, length_s: int = LEASE_S) -> KubernetesObject:
        """Held by this pod, with the version of `lease`: an update of a changed one is a conflict."""
        before: dict[str, Any] = lease.get("spec") or {}
        now = datetime.now(UTC).strftime("%Y-%m-%dT%H:%M:%S.%fZ")
        is_mine = before.get("holderIdentity") == self._identity
        spec = {
            "holderIdentity": self._identity,
            "leaseDurationSeconds": length_s,
            "acquireTime": before.get("acquireTime", now) if is_mine else now,
            "renewTime": now,
            "leaseTransitions": int(before.get("leaseTransitions") or 0) + (not is_mine),
        }
        metadata: dict[str, Any] = lease.get("metadata") or {}
        if self.use is not None:
            metadata = {**metadata, "annotations": {**(metadata.get("annotations") or {}), USE: json.dumps(astuple(self.use))}}
        return {"apiVersion": "coordination.k8s.io/v1", "kind": "Lease", **lease, "metadata": metadata, "spec": spec}

    async def _give_up(self) -> None:
        """So that another pod need not wait for its end."""
        if not self.is_held:
            return
        self._held_until = -1.0
        with suppress(Exception):  # then it ends by itself
            async with asyncio.timeout(GIVE_UP_S):
                lease = await self._api.call("get", LEASES, self._namespace, self._name)
                if (lease.get("spec") or {}).get("holderIdentity") == self._identity:
                    await self._api.call("update", LEASES, self._namespace, self._name, self._made(lease, length_s=1))


def _use_in(lease: KubernetesObject) -> DayUse | None:
    given = ((lease.get("metadata") or {}).get("annotations") or {}).get(USE)
    try:
        return None if given is None else DayUse.of(json.loads(given))
    except (ValueError, TypeError, RecursionError) as error:
        log.error("the annotation %s of a Lease does not say what was used of the day, which begins anew: %r", USE, error)
        return None
