"""Content digests of a model folder's text files, computed alike by gateway and engine and compared in the wire's Hello.

Pure: the caller reads the files and passes their content in.
"""

from __future__ import annotations

from collections.abc import Mapping
from hashlib import sha256

TEXT_FILES: Mapping[str, tuple[str, ...]] = {
    "tokenizer": ("tokenizer.json",),
    "template": ("chat_template.jinja", "tokenizer_config.json", "chat_template.json"),
}
"""Kind -> the files that decide it. A file that a folder lacks is left out."""


def text_digests(files: Mapping[str, bytes]) -> dict[str, str]:
    """For each kind of text file, hex SHA-256 over the names and contents of its files; "" where the folder has none.

    files  file name -> content, for the files of TEXT_FILES that exist
    """
    digests: dict[str, str] = {}
    for kind, names in TEXT_FILES.items():
        state = sha256()
        present = [name for name in names if name in files]
        for name in present:
            state.update(f"{name}\0{len(files[name])}\0".encode())
            state.update(files[name])
        digests[kind] = state.hexdigest() if present else ""
    return digests
