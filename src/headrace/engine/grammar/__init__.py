"""Prepares grammars for the engine and matches outputs against them: vets each in another process, compiles it once per tenant, and masks
tokens by it.

`sources` writes a `core.grammar.Grammar` in llguidance's language; `normalize` rewrites JSON schemas for it. `compiling` compiles the
result over the model's vocabulary, and `vetting` first tries it in a process that the kernel bounds. `store` keeps compiled grammars.
`preparer` connects these to the loop, and `slots` gives the runner its masks. llguidance is imported at the first grammar. The design is in
docs/structured.md.
"""
