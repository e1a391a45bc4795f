"""Serves the OpenAI-compatible API over HTTP: sends token ids to replicas, and turns the returned token ids into text."""
