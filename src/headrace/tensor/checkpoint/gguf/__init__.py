"""llama.cpp's GGUF files: a model in one file, or in shards, its tokenizer and chat template inside.

`folder` makes a folder in the Hugging Face layout from a file's header: config.json (`architectures`), tokenizer.json (`tokenizer`), and a
note of where the weights are. `checkpoint` reads the weights from the file itself, and makes them dense (`blocks`).
"""
