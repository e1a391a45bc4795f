"""Brings what ended gateways left in a spool to usage.db, where no gateway runs that does it."""

from __future__ import annotations

import os
import time
from contextlib import suppress
from pathlib import Path

from headrace.gateway.ledger.config import UsageConfig
from headrace.gateway.ledger.shipper import Shipper
from headrace.gateway.ledger.sink import SinkFailed
from headrace.gateway.ledger.spool import OPEN, Spool
from headrace.gateway.ledger.usage_db import FILE, SQL, UsageDb

SPOOL = "spool"
"""The spool's folder in the state folder."""


def ship_left_over(state: Path) -> None:
    """Nothing happens while a gateway ships, nor in another user's folder, whose files would become this user's. Raises ConfigError."""
    folder = state / SPOOL
    if not folder.is_dir() or folder.stat().st_uid != os.geteuid():
        return
    sinks = [path.name for path in folder.iterdir() if path.is_dir() and path.name != OPEN]
    if SQL not in sinks:
        return
    config = UsageConfig()
    spool = Spool(folder, sinks, config.max_spool_bytes)
    with suppress(OSError, SinkFailed), spool.shipping(SQL) as is_ours:
        if is_ours:
            spool.adopt()
            sink = UsageDb(str(state / FILE), retention_days=config.retention_days, unix_time=time.time)
            try:
                Shipper(spool, sink).ship_waiting()
            finally:
                sink.close()
