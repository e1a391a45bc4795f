"""Coordinates the gateway workers of one port: which worker this process is, and what the workers ask one another."""
