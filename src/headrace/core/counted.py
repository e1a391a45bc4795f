"""Formats a count with its noun for messages: "1 request", "2 requests"."""

from __future__ import annotations


def counted(count: int, noun: str) -> str:
    return f"{count} {noun}" if count == 1 else f"{count} {noun}s"
