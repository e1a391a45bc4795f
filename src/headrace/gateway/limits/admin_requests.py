"""`GET /limits`, `/tenants/NAME/limits` and `/keys/ID/limits` on the admin socket: what is used of limits (docs/limits.md)."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Mapping, Sequence
from functools import partial

from headrace.core.errors import ConfigError, InvalidRequest
from headrace.gateway.limits.report import LimitReport
from headrace.gateway.stores.store import StoreFailed

ReadLimits = Callable[[Callable[[LimitReport], Awaitable[list[dict[str, object]]]]], Awaitable[list[dict[str, object]]]]


class LimitRequests:
    """A `fleet.admin.AdminRequests`."""

    def __init__(self, read: ReadLimits) -> None:
        """read: gives what its argument makes of a report, opened for it alone"""
        self._read = read

    async def answer(
        self, method: str, path: Sequence[str], query: Mapping[str, str], body: Mapping[str, object], actor: str
    ) -> tuple[int, object] | None:
        """Status and JSON; None: no request of these. path: its parts"""
        work: Callable[[LimitReport], Awaitable[list[dict[str, object]]]]
        match [method, *path]:
            case ["GET", "limits"]:
                work = LimitReport.of_deployment
            case ["GET", "keys" | "tenants" as kind, name, "limits"]:
                work = partial(LimitReport.of, kind=kind, name=name)
            case _:
                return None
        try:
            return 200, await self._read(work)
        except (InvalidRequest, ConfigError) as error:
            return 400, {"error": str(error)}
        except StoreFailed as error:
            return 503, {"error": str(error)}
