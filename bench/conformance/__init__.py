"""Which JSON schemas the grammars of the engine enforce, and whether they do."""
