"""Finds the state folder that a command uses, makes it where it is missing, and asks whether its store has keys.

Every command looks in the same order: `--state`, HEADRACE_STATE, `state` of the configuration file, the user's own folder. So `headrace
keys` without arguments works on what `headrace serve` without arguments uses.
"""

from __future__ import annotations

import asyncio
import os
import stat
from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from headrace.core.errors import ConfigError
from headrace.gateway.stores.config import StoreConfig
from headrace.machine.folders import expanded

VARIABLE = "HEADRACE_STATE"


def state_folder(given: str, environment: Mapping[str, str]) -> Path:
    """An absolute path; nothing is created. given: by flag, variable or file; empty: the user's default folder"""
    if given:
        return expanded(given).absolute()
    base = environment.get("XDG_STATE_HOME", "")
    if not os.path.isabs(base):  # the standard has relative ones ignored
        return expanded("~/.local/state/headrace")
    return Path(base) / "headrace"


def make_state_folder(folder: Path) -> None:
    """Raises ConfigError if it is not safe or cannot be written. An existing folder keeps its mode: its files are closed to other users
    by themselves."""
    if not folder.is_absolute():
        raise ConfigError("state", "this user has no home folder (HOME is not set)", f"Name a folder: --state DIR, or {VARIABLE}.")
    try:
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        info = folder.stat()
    except OSError as error:
        raise ConfigError("state", f"{folder} cannot be made ({error.strerror})", "Name another folder: --state DIR.") from None
    if info.st_mode & stat.S_IWOTH:
        raise ConfigError("state", f"{folder} may be written by other users", f"chmod 700 {folder}, or name a folder in it.")
    if os.geteuid() == 0 and info.st_uid != 0:
        reason = f"{folder} belongs to user {info.st_uid}, and files that root makes would be closed to that user"
        raise ConfigError("state", reason, "Run this command as that user.")
    if not os.access(folder, os.W_OK | os.X_OK):
        raise ConfigError("state", f"{folder} cannot be written by this user", "Name another folder: --state DIR.")


ASK_S = 5.0


def has_stored_keys(state: str, store: StoreConfig) -> bool:
    """Whether the store has ever had a key; nothing is created. Raises ConfigError if the store cannot be asked."""
    from headrace.gateway.access.key_store import FILE
    from headrace.gateway.stores.store import StoreFailed

    if not store.url and not (Path(state) / FILE).exists():
        return False
    try:
        with ThreadPoolExecutor(1) as pool:  # `asyncio.run` also below a running event loop, where a reload reads the configuration
            return pool.submit(asyncio.run, _has_keys(state, store)).result()
    except (StoreFailed, TimeoutError) as error:
        reason = f"cannot be asked whether there are API keys ({error or 'no answer'})"
        raise ConfigError("gateway.store.url" if store.url else "state", reason) from None


async def _has_keys(state: str, store: StoreConfig) -> bool:
    from headrace.gateway.access.key_store import open_keys

    opened = open_keys(state, store)
    assert opened is not None, "one of the two is given"
    try:
        async with asyncio.timeout(ASK_S):
            return (await opened.state()).has_keys
    finally:
        await opened.close()
