"""Lets OpenAI-compatible servers of other makes answer a model's requests. docs/foreign.md has the path of a request."""
