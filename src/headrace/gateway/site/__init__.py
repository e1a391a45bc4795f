"""Coordinates the gateway workers of one port: which one this is, and what they ask one another."""
