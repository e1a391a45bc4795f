"""Tests closing a Redis client whose server does not let go."""

from __future__ import annotations

from unittest.mock import AsyncMock

import pytest
import redis

from headrace.gateway.stores.redis import RedisCalls


@pytest.mark.loop
@pytest.mark.parametrize("place", ["connection_pool.disconnect", "aclose"])
async def test_a_connection_that_cannot_be_closed_in_time_keeps_no_gateway_from_ending(place: str) -> None:
    client = AsyncMock()
    late = redis.TimeoutError("Timed out closing connection after 1.0")
    client.configure_mock(**{f"{place}.side_effect": late})
    await RedisCalls(client).close()
    client.aclose.assert_awaited_once()
