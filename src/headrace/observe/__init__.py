"""Metrics and the structured request log."""
