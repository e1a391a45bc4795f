"""Trains the bundled request classifier: prompts from templates, training, evaluation. Start at README.md."""
