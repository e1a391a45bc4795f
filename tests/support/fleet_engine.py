"""An engine process of tests: what the supervisor wrote, plus the fake's options. Arguments: OPTIONS --config FILE --parent-fd N.

"replicas" among the options names others for replicas whose name begins so: {"replicas": {"bad-": {"refuse": "no"}}}.
"die": it ends at once. "hang_s": it does nothing for these seconds, and then ends.
"""

from __future__ import annotations

import json
import sys
import time
from pathlib import Path

from headrace.lab.fake_engine import main

if __name__ == "__main__":
    options, arguments = Path(sys.argv[1]), sys.argv[2:]
    path = Path(arguments[arguments.index("--config") + 1])
    content = json.loads(path.read_text())
    fake = json.loads(options.read_text())
    for prefix, more in fake.pop("replicas", {}).items():
        if content["replica"].startswith(prefix):
            fake |= more
    if fake.pop("die", False):
        sys.exit(9)
    if (hang_s := fake.pop("hang_s", 0.0)) > 0:
        time.sleep(hang_s)
        sys.exit(9)
    path.write_text(json.dumps({**content, "fake": fake}))
    main(arguments)
