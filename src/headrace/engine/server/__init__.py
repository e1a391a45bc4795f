"""Connects the engine's loop to the wire."""
