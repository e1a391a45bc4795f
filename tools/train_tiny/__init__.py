"""How the bundled tiny models were made: corpus, tokenizer, training, evaluation. Start at README.md."""
