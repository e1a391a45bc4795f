"""What of a gateway's configuration may change while it runs. Pure; `control.reload` applies it."""

from __future__ import annotations

from headrace.core.differences import differences
from headrace.core.errors import ConfigError
from headrace.gateway.config import GatewayConfig

CHANGEABLE = (
    "models",
    "api_keys",
    "open_metrics",
    "open_tenant_metrics",
    "metrics_tenants",
    "allowed_hosts",
    "allowed_origins",
    "request_log",
    "tls",
    "trusted_proxies",
    "limits.max_body_bytes",
    "limits.max_connections",
    "limits.max_header_bytes",
    "limits.max_headers",
    "limits.max_json_depth",
    "limits.max_messages",
    "limits.max_prompts",
    "limits.max_sequences",
    "limits.max_requests",
    "limits.max_text_workers",
    "limits.max_pending_bytes",
    "limits.max_prompt_bytes",
    "limits.max_answer_bytes",
    "limits.max_tenant_share",
    "limits.max_request_held_bytes",
    "limits.daily_budget",
    "limits.monthly_budget",
    "limits.on_store_failure",
    "timeouts.header_s",
    "timeouts.body_s",
    "timeouts.keep_alive_s",
    "timeouts.sse_ping_s",
    "timeouts.write_s",
    "timeouts.request_s",
    "timeouts.drain_s",
    "timeouts.failover_s",
    "routing",
    "admission",
    "tiers",
    "prices",
    "usage",
    "cache.enabled",
    "cache.models",
    "cache.ttl_s",
    "idempotency.ttl_s",
)
"""Paths that may change, each with all below it. Whatever is not here takes a restart; a new option does until what runs follows it."""


def check_change(before: GatewayConfig, after: GatewayConfig) -> None:
    """Raise ConfigError naming the first difference that takes a restart."""
    for difference in differences(before, after):
        if not any(_is_within(difference.path, path) for path in CHANGEABLE):
            raise ConfigError(difference.path, "cannot change while the gateway runs", "Start the gateway again, or write what it was.")


def _is_within(path: str, prefix: str) -> bool:
    return path == prefix or path.startswith((f"{prefix}.", f"{prefix}["))
