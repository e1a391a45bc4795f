"""Checks which JSON schemas the engine's grammars accept, and whether they enforce them."""
