"""Applies a changed configuration to a running gateway: all of it at once, or nothing.

What can fail comes first and changes nothing: reading and checking the file, and what opening the difference needs. Then the change is
made between two rounds of the event loop: a request sees the configuration before or the one after, never a mixture, and keeps what it
began with. `control.requests` says when.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Iterable

from headrace.core.counted import counted
from headrace.core.differences import differences
from headrace.gateway.access.open_requests import Draining, OpenRequests
from headrace.gateway.config import GatewayConfig
from headrace.gateway.control.changes import check_change
from headrace.gateway.control.models import ModelOpener, OpenModel
from headrace.wire.leash import ModelStatuses, ReplicaStatus

log = logging.getLogger("headrace.gateway")


class Reloader:
    """config: what holds now"""

    def __init__(self, config: GatewayConfig, models: Iterable[OpenModel], opener: ModelOpener, open_requests: OpenRequests) -> None:
        """models: what `opener` made of the configuration"""
        self.config = config
        self._open_requests = open_requests
        self._models = {model.config.name: model for model in models}
        self._opener = opener

    async def reload(self, read: Callable[[], GatewayConfig]) -> None:
        """Apply what `read` gives, which may block. Raises ConfigError, CheckpointError and Draining; nothing was changed then."""
        config = await asyncio.to_thread(read)
        if self._open_requests.is_draining:
            raise Draining("this gateway is shutting down")
        check_change(self.config, config)
        found = list(differences(self.config, config))
        changes = [self._opener.change_replicas(self._models[model.name], model) for model in config.models if model.replicas]
        for change in changes:
            change.apply()
        self.config = config
        log.info("the configuration was read again: %s", counted(len(found), "difference"))
        for difference in found:
            log.info("%s", difference)

    def status(self) -> ModelStatuses:
        """Every model's replicas, retired ones too."""
        return {
            name: {
                replica.name: ReplicaStatus(not replica.reason, replica.reason, replica.num_open)
                for replica in (*model.served.upstream.retired_replicas(), *model.served.upstream.replicas())
            }
            for name, model in self._models.items()
        }
