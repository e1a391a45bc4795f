"""Finds the endpoints of `surfaces.routes` that answer a path, and says how the request log shows a path: the gateway's router.

A path without a name in it is found by one look-up. Then the paths with names are tried, in the table's order: {name} stands for one part
of a path, {name:path} for the rest of it. Every path is looked up in its plain form (`plain_path`), and nothing else reads another form.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, field

from headrace.gateway.http.errors import MethodNotAllowed
from headrace.gateway.http.framing import OPENAI, Framing
from headrace.gateway.surfaces.endpoint import Endpoint
from headrace.gateway.surfaces.routes import ENDPOINTS, Handler

MAX_LOGGED_PATH = 200
_SLASHES = re.compile("/{2,}")
_NAMED = re.compile(r"\\{(\w+)(:path)?\\}")


@dataclass(slots=True)
class AnsweredPath:
    """One path of the table.

    methods    HTTP method -> endpoint
    generates  one of the endpoints generates tokens
    is_quiet   all endpoints are quiet
    is_public  all endpoints are public: the path needs no key
    is_probe   all endpoints are probes: every Host is allowed
    framing    framing of the path's API
    """

    path: str
    shown_path: str
    methods: dict[str, Endpoint[Handler]] = field(default_factory=dict)
    generates: bool = False
    is_quiet: bool = True
    is_public: bool = True
    is_probe: bool = True
    framing: Framing = OPENAI

    def add(self, endpoint: Endpoint[Handler]) -> None:
        assert endpoint.method not in self.methods, f"two rows answer {endpoint.method} {self.path}"
        self.methods[endpoint.method] = endpoint
        self.generates = self.generates or endpoint.generates
        self.framing = endpoint.framing
        self.is_quiet = self.is_quiet and endpoint.is_quiet
        self.is_public = self.is_public and endpoint.is_public
        self.is_probe = self.is_probe and endpoint.is_probe

    def endpoint(self, method: str) -> Endpoint[Handler]:
        """Raises MethodNotAllowed."""
        is_get = method == "HEAD" or (method == "OPTIONS" and self.is_probe)  # OPTIONS: how load balancers ask by default
        found = self.methods.get("GET" if is_get else method)
        if found is None:
            raise MethodNotAllowed(method, tuple(sorted({*self.methods, "HEAD"} if "GET" in self.methods else self.methods)))
        return found

    @property
    def pattern(self) -> re.Pattern[str]:
        return re.compile(_NAMED.sub(lambda name: f"(?P<{name[1]}>{'.+' if name[2] else '[^/]+'})", re.escape(self.path)))


def _paths() -> dict[str, AnsweredPath]:
    paths: dict[str, AnsweredPath] = {}
    for endpoint in ENDPOINTS:
        paths.setdefault(endpoint.path, AnsweredPath(endpoint.path, endpoint.shown_path)).add(endpoint)
    return paths


_PATHS = {path: answered for path, answered in _paths().items() if "{" not in path}
_PATTERNS = [(answered.pattern, answered) for path, answered in _paths().items() if path not in _PATHS]
_BEGINNINGS = {answered.shown_path.partition("{")[0]: answered.shown_path for _, answered in _PATTERNS}
"""Beginnings of the paths that go on with a name, and these paths as they are shown: "/v1/sessions/" and "/v1/sessions/{id}"."""


def plain_path(path: str) -> str:
    """A decoded path with single slashes and none at its end. Clients that join a base URL badly send others, and a redirect, which most
    of them follow with a GET, would lose the body.
    """
    return _SLASHES.sub("/", path).rstrip("/") or "/"


def find_path(path: str) -> tuple[AnsweredPath | None, Mapping[str, str]]:
    """(path of the table, values of its names) for a plain path; (None, ...): no path of the table matches."""
    found = _PATHS.get(path)
    if found is not None:
        return found, {}
    for pattern, answered in _PATTERNS:
        if (match := pattern.fullmatch(path)) is not None:
            return answered, match.groupdict()
    return None, {}


def logged_path(path: str) -> str:
    """A path for the request log, without the name that a client put into it: sessions are named by clients."""
    if path in _PATHS:
        return path
    return next((shown for beginning, shown in _BEGINNINGS.items() if path.startswith(beginning)), path)[:MAX_LOGGED_PATH]
