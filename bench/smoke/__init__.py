"""Finds out in minutes whether a change made anything slower: the working tree against another commit, in turns (`make bench-smoke`).

`run` has the order of the work, `worker` what is timed, `verdict` when a difference is an alarm; `trees` and `children` hold the rest.
"""
