"""Runs a model's engine: takes requests from an inbox, plans steps, has a runner compute them, and emits updates."""
