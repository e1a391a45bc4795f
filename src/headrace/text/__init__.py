"""Text: tokenizers, chat templates, incremental detokenizing, stop strings. Knows no HTTP and no tensors."""
