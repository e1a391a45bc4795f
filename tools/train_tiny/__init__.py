"""Trains the bundled tiny models: corpus, tokenizer, training, evaluation. Start at README.md."""
