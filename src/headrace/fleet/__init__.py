"""Keeps the gateways and engines of one machine running; docs/fleet.md has the why."""
