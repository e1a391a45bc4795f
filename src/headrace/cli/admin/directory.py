"""Opens the keys and tenants for a command: those of a state folder, of a configuration's Redis, or, with `--admin`, of a running
deployment."""

from __future__ import annotations

import os
import pwd
import sys
import time
from collections.abc import Awaitable, Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from inspect import Parameter, signature
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, TypeVar

import typer

from headrace.cli.exits import UsageRefused
from headrace.cli.flags.flag import GivenFlags
from headrace.policy.limits.tier import all_tiers

if TYPE_CHECKING:
    from headrace.cli.config.sections import ServeConfig
    from headrace.gateway.access.administration import Administration
    from headrace.gateway.limits.report import LimitReport

T = TypeVar("T")

ConfigFile = Annotated[Path | None, typer.Option("--config", help="YAML file of the server: its tiers, its state folder and its stores.")]
StateFolder = Annotated[
    str | None,
    typer.Option("--state", metavar="DIR", help="The server's state folder. Default: HEADRACE_STATE, else ~/.local/state/headrace."),
]
AdminUrl = Annotated[
    str | None, typer.Option("--admin", metavar="URL", help="A deployment on another machine, as its admin.listen says: https://HOST:PORT.")
]
AdminFiles = Annotated[
    Path | None, typer.Option("--tls-dir", metavar="DIR", help="With --admin: the folder of ca.crt, tls.crt, tls.key and token.")
]
AsJson = Annotated[bool, typer.Option("--json", help="JSON instead of text.")]


@dataclass(frozen=True, slots=True)
class KeyDirectory:
    """Methods raise ConfigError, InvalidRequest and StoreFailed; with `admin`, ServerFailed and UsageRefused."""

    file: Path | None
    state: str | None
    admin: str | None
    tls_dir: Path | None

    def ask(self, method: str, *path: str, query: Mapping[str, str] | None = None, body: Mapping[str, object] | None = None) -> Any:
        """The JSON data that answers one of `access.admin_requests.REQUESTS`."""
        from headrace.gateway.access.admin_requests import answer_request

        if self.is_remote:
            return self._ask_deployment(method, *path, query=query, body=body)
        return administered(self.file, self.state, lambda admin: answer_request(admin, method, path, query, body))

    def limits(self, kind: str, name: str) -> Any:
        """kind: "keys" or "tenants\""""
        if self.file is None and not self.is_remote:
            print("headrace: limits are those of built-in tiers; where the server has a configuration file, give --config", file=sys.stderr)
        return self._report(lambda report: report.of(kind, name), kind, name)

    def deployment_limits(self) -> Any:
        return self._report(lambda report: report.of_deployment())

    def _report(self, work: Callable[[LimitReport], Awaitable[list[dict[str, object]]]], *path: str) -> Any:
        """path: of the same report at a deployment, before /limits"""
        if self.is_remote:
            return self._ask_deployment("GET", *path, "limits")
        config = settings_of(self.file, self.state)
        return administered(self.file, self.state, lambda admin: read_limits(config, admin, work))

    def note_unpriced_models(self, budget: float | None, names: Sequence[str] = ()) -> None:
        """Print on stderr the models without a price, whose requests do not count for a budget. names: a key's models; none: all"""
        if not budget or self.is_remote:
            return
        if self.file is None:
            print("headrace: --budget: it counts by the server's `prices`; give --config to have them looked at", file=sys.stderr)
            return
        config = settings_of(self.file, self.state)
        used = {*names, *(model for name in names if name in config.routes for model in config.routes[name].models)}
        sections = [section for section in config.models if not names or {section.served_name, *section.aliases} & used]
        if unpriced := [section.served_name for section in sections if section.served_name not in config.prices]:
            print(f"headrace: --budget: {self.file} has no price of {', '.join(unpriced)}: such requests cost nothing", file=sys.stderr)

    def note_unknown_models(self, names: Sequence[str]) -> None:
        """Print on stderr which of these models the configuration lacks."""
        if self.file is None or not names:
            return
        config = settings_of(self.file, self.state)
        served = [*(model for section in config.models for model in (section.served_name, *section.aliases)), *config.routes]
        for name in names:
            if name not in served:
                print(f"headrace: {self.file} has no model {name}; it has {', '.join(served)}", file=sys.stderr)

    def purge(self, tenant: str, *, is_all: bool) -> int:
        """Remove a tenant's kept answers, or with `is_all` all its kept entries. Returns their number."""
        from headrace.gateway.control.purge import purge

        if self.is_remote:
            return int(self._ask_deployment("DELETE", "cache", tenant, body={"all": is_all})["removed"])
        config = settings_of(self.file, self.state).whole_gateway()
        return administered(self.file, self.state, lambda admin: purge(config, tenant, admin, time.time, is_all=is_all))

    @property
    def is_remote(self) -> bool:
        return self.admin is not None or self.tls_dir is not None

    def _ask_deployment(
        self, method: str, *path: str, query: Mapping[str, str] | None = None, body: Mapping[str, object] | None = None
    ) -> Any:
        from headrace.cli.admin.client import open_client

        if self.file is not None or self.state is not None:
            raise UsageRefused("--admin: the deployment has its own file and state; leave out --config and --state.")
        return open_client(None, self.admin, self.tls_dir).request(method, path, query or {}, body)


def of_directory(command: Callable[..., None]) -> Callable[..., None]:
    """A command whose first parameter is replaced by the flags that choose a `KeyDirectory`."""

    def run(
        *words: Any,
        config: ConfigFile = None,
        state: StateFolder = None,
        admin: AdminUrl = None,
        tls_dir: AdminFiles = None,
        **given: Any,
    ) -> None:
        command(KeyDirectory(config, state, admin, tls_dir), *words, **given)

    shape = signature(command, eval_str=True)
    _, *own = shape.parameters.values()
    _, *flags, _ = signature(run, eval_str=True).parameters.values()
    together = [parameter.replace(kind=Parameter.KEYWORD_ONLY) for parameter in (*own, *flags)]
    run.__signature__ = shape.replace(parameters=together)  # type: ignore[attr-defined]
    run.__name__, run.__doc__, run.__annotations__ = command.__name__, command.__doc__, {}
    return run


def administered(file: Path | None, state: str | None, work: Callable[[Administration], Awaitable[T]]) -> T:
    import asyncio  # brings ssl, which takes its time

    config = settings_of(file, state)

    async def run() -> T:
        administration = open_administration(config, actor=f"{user_name(os.geteuid())}, by command")
        try:
            return await work(administration)
        finally:
            await administration.close()

    return asyncio.run(run())


async def read_limits(
    config: ServeConfig, admin: Administration, work: Callable[[LimitReport], Awaitable[list[dict[str, object]]]]
) -> list[dict[str, object]]:
    from headrace.gateway.limits.report import LimitReport
    from headrace.gateway.limits.store import open_limits

    store = open_limits(config.gateway.store, config.state, clock=time.monotonic, unix_time=time.time)
    try:
        return await work(LimitReport(admin, store, all_tiers(config.tiers), config.gateway.limits.budget, time.time))
    finally:
        await store.close()


def settings_of(file: Path | None, state: str | None) -> ServeConfig:
    from headrace.cli.config.load import load_settings

    return load_settings(file, os.environ, GivenFlags({} if state is None else {"state": state}))


def open_administration(config: ServeConfig, *, actor: str) -> Administration:
    """actor: see `AuditRecord`. Raises ConfigError."""
    from headrace.cli.config.state import make_state_folder
    from headrace.gateway.access.administration import Administration
    from headrace.gateway.access.key_store import open_keys

    make_state_folder(Path(config.state))
    store = open_keys(config.state, config.gateway.store)
    assert store is not None, "`load` names a state folder"
    return Administration(store, tiers=all_tiers(config.tiers), unix_time=time.time, actor=actor)


def user_name(uid: int) -> str:
    with suppress(KeyError):
        return pwd.getpwuid(uid).pw_name
    return f"user {uid}"
