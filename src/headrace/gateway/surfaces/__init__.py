"""The HTTP API: one file per surface and one row each in the table of routes."""
