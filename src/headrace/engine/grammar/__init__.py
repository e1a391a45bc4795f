"""Grammars in the engine: vetted in another process, compiled once per tenant, and matched token by token in the runner's slots.

`vocabulary` is what a model can write; `sources` writes a `core.grammar.Grammar` in llguidance's language, JSON schemas as `normalize` has
them; `compiling` compiles it; `vetting` has it tried in a process that the kernel bounds; `store` keeps compiled grammars; `preparer` ties
these to the loop; `slots` gives the runner its masks. The design is in docs/structured.md. llguidance is imported at the first grammar.
"""
