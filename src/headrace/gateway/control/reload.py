"""Applies a changed configuration to a running gateway, all of it or nothing, and refuses changes that take a restart.

The steps that can fail come first and change nothing. Then the change is made between two rounds of the event loop, so that a request keeps
the configuration it began with. Reloads run one after another; a request for the status is answered at once.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import AsyncExitStack, asynccontextmanager, suppress
from dataclasses import replace

from headrace.core.differences import differences
from headrace.core.errors import ConfigError, HeadraceError, counted
from headrace.core.option import live_paths
from headrace.gateway.access.open_requests import Draining
from headrace.gateway.app import Gateway
from headrace.gateway.config import LOG_TARGETS, GatewayConfig
from headrace.gateway.control.protections import check_keeps_protections, gives_up_keys
from headrace.gateway.control.site_models import SiteModels
from headrace.gateway.control.texts import LoadedTexts
from headrace.gateway.upstream.served_models import ModelTable
from headrace.machine.signals import StopSignals, on_hangup
from headrace.observe.request_log import RequestLog
from headrace.wire.leash import Leash, LeashRequest, LeashRequestKind, ModelStatuses

CHANGEABLE = tuple(live_paths(GatewayConfig))
"""Sections that say `Reload.LIVE`, with all below them."""


def check_change(before: GatewayConfig, after: GatewayConfig) -> None:
    for difference in differences(before, after):
        if not any(_is_within(difference.path, path) for path in CHANGEABLE):
            raise ConfigError(difference.path, "cannot change while the gateway runs", "Start the gateway again, or write what it was.")


def _is_within(path: str, prefix: str) -> bool:
    return path == prefix or path.startswith((f"{prefix}.", f"{prefix}["))


log = logging.getLogger("headrace.gateway")

Read = Callable[[], GatewayConfig]
"""May block. Raises ConfigError."""

Follow = Callable[[GatewayConfig], Callable[[], None]]
"""Prepares a change of one shared object in a thread; may read files. Calling the result applies it. Raises ConfigError."""


class Reloader:
    """Applies changed configurations to one running gateway."""

    def __init__(self, app: Gateway, models: SiteModels, texts: LoadedTexts, open_log: Callable[[str], RequestLog]) -> None:
        """open_log raises ConfigError"""
        self._app = app
        self._open_log = open_log
        self._models = models
        self._texts = texts
        self._followers: list[Follow] = []

    @property
    def config(self) -> GatewayConfig:
        return self._app.config

    def follow(self, follower: Follow) -> None:
        self._followers.append(follower)

    def status(self) -> ModelStatuses:
        return self._models.status()

    def check(self) -> None:
        self._models.check()
        assert [model.name for model in self._app.service.models.models] == [model.name for model in self.config.models]

    async def reload(self, read: Read) -> None:
        """One call at a time. Raises ConfigError, CheckpointError or Draining, changing nothing."""
        config = await asyncio.to_thread(read)
        if self._app.service.open_requests.is_draining:
            raise Draining("this gateway is shutting down")
        before = self.config
        check_change(before, config)
        async with AsyncExitStack() as undo:
            follows = [await asyncio.to_thread(follow, config) for follow in self._followers]
            request_log = self._request_log(config)
            if request_log is not self._app.request_log:
                undo.push_async_callback(asyncio.to_thread, request_log.close)
            texts = await self._texts.prepare(config.models, config.limits.max_text_workers, self._models.texts_in_use)
            undo.push_async_callback(texts.close)
            apply_models = await self._models.prepare(config.models, config.pool_rules, texts.texts)
            undo.pop_all()
        former_log, self._app.request_log = self._app.request_log, request_log
        apply_models(self._app.active.requests_without_model)
        self._texts.apply(texts)
        served = replace(self._app.service, config=config.requests, models=ModelTable(self._models.served, config.routes))
        self._app.follow(config, served)
        for apply in follows:
            apply()
        _log_differences(before, config)
        if former_log is not request_log:
            await asyncio.to_thread(former_log.close)

    async def reload_file(self, read: Read) -> None:
        """Also refused where it loses what protects the server."""
        config = await asyncio.to_thread(read)
        stored = self._app.stored_keys if gives_up_keys(self.config, config) else None
        check_keeps_protections(self.config, config, has_stored_keys=stored is not None and await stored.has_keys())
        await self.reload(lambda: config)

    def _request_log(self, config: GatewayConfig) -> RequestLog:
        """A file is always opened again, in case it was moved by log rotation. Raises ConfigError."""
        target = config.request_log_target
        if target == self.config.request_log_target and target in LOG_TARGETS:
            return self._app.request_log
        return self._open_log(target)


def _log_differences(before: GatewayConfig, after: GatewayConfig) -> None:
    changes = list(differences(before, after))
    log.info("the configuration was read again: %s", counted(len(changes), "difference"))
    for difference in changes:
        log.info("%s", difference)


INTERNAL = "the change failed by a fault of this program; its log says more"


@asynccontextmanager
async def answering(leash: Leash, reloader: Reloader, read: Read | None, stop: StopSignals) -> AsyncIterator[None]:
    """read: None, there is no file, and SIGHUP drains"""
    waiting: asyncio.Queue[LeashRequest | None] = asyncio.Queue()  # None: asked by a signal, which gets no answer but the log
    is_hangup_waiting = asyncio.Event()  # one reload answers all signals that came before it
    loop = asyncio.get_running_loop()

    def take(request: LeashRequest) -> None:
        if request.kind is LeashRequestKind.STATUS:
            leash.status(request, reloader.status())
        else:
            waiting.put_nowait(request)

    def hand_over(request: LeashRequest) -> None:  # in the leash's thread
        with suppress(RuntimeError):  # the loop is closed: this process ends
            loop.call_soon_threadsafe(take, request)

    def hang_up() -> None:
        if not is_hangup_waiting.is_set():
            is_hangup_waiting.set()
            waiting.put_nowait(None)

    async def reload_in_order() -> None:
        while True:
            request = await waiting.get()
            if request is None:
                is_hangup_waiting.clear()
            # A supervisor has checked its file, and takes a change back that another gateway refuses.
            reason = await _why_refused(reloader.reload_file if request is None else reloader.reload, read)
            if reason:
                log.error("the configuration stays as it is: %s", reason)
            if request is not None and reason:
                leash.refused(request, reason)
            elif request is not None:
                leash.reloaded(request)

    leash.listen(hand_over)
    reloading = loop.create_task(reload_in_order(), name="reloads")
    try:
        with on_hangup(None if read is None else hang_up, stop):
            yield
    finally:
        leash.listen(None)
        reloading.cancel()
        await asyncio.gather(reloading, return_exceptions=True)


async def _why_refused(reload: Callable[[Read], Awaitable[None]], read: Read | None) -> str:
    """Empty: the change was applied."""
    if read is None:
        return "this gateway was started without a file"
    try:
        await reload(read)
    except HeadraceError as error:
        return str(error)
    except Exception:  # the outermost loop: a bug must not leave later requests unanswered
        log.exception("reading the configuration again failed")
        return INTERNAL
    return ""
