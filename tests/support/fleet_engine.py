"""Runs an engine process of tests: what the supervisor wrote, plus the fake's options. Arguments: OPTIONS --config FILE --parent-fd N.

"die" among the options: it ends at once.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path

from headrace.lab.fake_engine import main

if __name__ == "__main__":
    options, arguments = Path(sys.argv[1]), sys.argv[2:]
    path = Path(arguments[arguments.index("--config") + 1])
    fake = json.loads(options.read_text())
    if fake.pop("die", False):
        sys.exit(9)
    path.write_text(json.dumps({**json.loads(path.read_text()), "fake": fake}))
    main(arguments)
