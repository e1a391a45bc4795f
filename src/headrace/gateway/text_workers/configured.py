"""The text workers that a gateway's configuration asks for.

Imports little: the workers are started before the gateway's own modules are loaded.
"""

from __future__ import annotations

from headrace.gateway.config import GatewayConfig
from headrace.gateway.text_workers.frames import HostConfig
from headrace.gateway.text_workers.processes import HostProcess


def text_workers(config: GatewayConfig) -> HostProcess:
    """The text workers, not yet started. They tokenize for the models that engines serve, and parse large bodies for every model."""
    return HostProcess(host_config(config), withheld=key_variables(config))


def host_config(config: GatewayConfig) -> HostConfig:
    """What the text workers' host loads for a configuration that is opened anew."""
    return HostConfig({model.name: model.folder for model in config.models if model.folder}, config.limits)


def key_variables(config: GatewayConfig) -> frozenset[str]:
    """Environment variables that hold the keys of foreign servers."""
    return frozenset(upstream.api_key_env for model in config.models for upstream in model.upstreams if upstream.api_key_env)
