"""What generating needs, and where a request's clock and seed come from. Made once by `gateway.compose`."""

from __future__ import annotations

import secrets
import time
from collections.abc import Callable
from dataclasses import dataclass, field

from headrace.core.clock import Clock
from headrace.gateway.access.open_requests import OpenRequests
from headrace.gateway.config import GatewayConfig
from headrace.gateway.generation.text_pool import TextPool
from headrace.gateway.http.sse import StreamWatch
from headrace.gateway.upstream.served_models import ModelTable
from headrace.observe.metrics import Metrics

MAX_DRAWN_SEED = 2**63


@dataclass(frozen=True, slots=True)
class Service:
    """
    salt_key   turns tenants into cache salts
    clock      of arrivals, deadlines and latencies
    draw_seed  of a request whose client names none
    """

    config: GatewayConfig
    models: ModelTable
    open_requests: OpenRequests
    watch: StreamWatch
    text_pool: TextPool
    metrics: Metrics
    salt_key: bytes
    clock: Clock = time.monotonic
    draw_seed: Callable[[], int] = field(default=lambda: secrets.randbelow(MAX_DRAWN_SEED))
