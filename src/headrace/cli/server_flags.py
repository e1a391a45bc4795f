"""Declares the flags that several of `headrace serve`, `headrace gateway` and `headrace engine` have, each once."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

Flag = typer.Option

ConfigPath = Annotated[Path | None, Flag("--config", help="YAML file; see docs/config.md.")]
ServedNames = Annotated[list[str] | None, Flag("--served-model-name", help="What clients ask for; again for aliases.")]
Host = Annotated[str | None, Flag("--host", help="Where to listen; beyond loopback wants --api-key. Default 127.0.0.1.")]
Port = Annotated[int | None, Flag("--port", help="0 takes a free one. Default 8000.")]
ApiKeys = Annotated[list[str] | None, Flag("--api-key", envvar="HEADRACE_API_KEY", help="Clients must send one of these.")]
AllowOpen = Annotated[bool, Flag("--allow-open", help="Listen beyond loopback without API keys.")]
AllowedHosts = Annotated[
    list[str] | None, Flag("--allowed-hosts", help="Name a Host header may carry; again for more. Default: any, on loopback its own names.")
]
AllowedOrigins = Annotated[
    list[str] | None, Flag("--allowed-origins", help="Origin whose pages a browser lets use this server, or *; again for more.")
]
CertificateFile = Annotated[str | None, Flag("--ssl-certfile", help="Certificate of the port, in PEM; it speaks https then.")]
PrivateKeyFile = Annotated[str | None, Flag("--ssl-keyfile", help="The certificate's private key, in PEM.")]
RequestLogTarget = Annotated[
    str | None, Flag("--request-log", help="One line per request: on (stdout), off, stderr or a file. Default on.")
]
LogFormatName = Annotated[
    str | None, Flag("--log-format", help="text, json, or auto: text on a terminal and JSON elsewhere. Default auto.")
]
StateOfServer = Annotated[
    str | None, Flag("--state", metavar="DIR", help="Folder of keys, limits and usage. Default ~/.local/state/headrace.")
]
DrainTimeout = Annotated[float | None, Flag("--drain-timeout", help="Seconds running requests may take after SIGTERM.")]
Experimental = Annotated[bool, Flag("--experimental", help="Allow what has not been run where Headrace is tested.")]
TlsFolder = Annotated[Path | None, Flag("--tls-dir", help="Folder with ca.crt, tls.crt, tls.key and token, as headrace tls init makes it.")]
ParentFd = Annotated[int | None, Flag("--parent-fd", hidden=True, help="Inherited end of the supervisor's leash.")]
