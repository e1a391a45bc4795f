"""Names for the integers and strings that must not be mixed up."""

from __future__ import annotations

from typing import NewType

RequestId = NewType("RequestId", str)
"""Made by the gateway, never taken from a client header."""

PreparationId = NewType("PreparationId", int)
"""What one engine process prepared for one request. Never reused; a request id and its epoch may recur after a cancel."""

SeqId = NewType("SeqId", int)
"""One token stream inside one engine process. Never reused while the process lives."""

SlotId = NewType("SlotId", int)
"""A row of the runner's persistent state, held by a sequence from its first plan to its end; reused afterwards."""
