"""Implements what several surfaces share of OpenAI's API: wire types, the treatment of each field, parsing, answers."""
