"""Prepares grammars for the engine and matches outputs against them; the design is in docs/structured.md.

`sources` writes a `core.grammar.Grammar` in llguidance's language; `preparer` connects this to the loop, `slots` to the runner.
"""
