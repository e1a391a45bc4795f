"""Grammars in the engine: compiled, and matched token by token in the runner's slots.

`vocabulary` is what a model can write; `sources` writes a `core.grammar.Grammar` in llguidance's language; `compiling` compiles it;
`slots` gives the runner its masks. The design is in docs/structured.md. llguidance is imported at the first grammar.
"""
