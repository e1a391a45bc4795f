"""OpenAI's words, shared by several surfaces: wire types, the treatment of each field, parsing, answers."""
