"""Implements the HTTP API: one file per surface, and its rows in the table of routes."""
