"""Parses generated text into content, reasoning and tool calls, by the format of a model's family.

`formats` is the table of families and the choice of a row; `parser` reads text that follows a row; `forced` writes the grammar of a call
that the model must make. No token is seen here, and no request. The design is in docs/structured.md.
"""
