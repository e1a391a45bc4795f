"""`make bench-smoke`: did this change make anything slower? The working tree against another commit, in turns, a verdict in minutes.

Read `run` (what happens when), `worker` (what is timed), `verdict` (when it is an alarm); `trees` and `children` hold the rest.
"""
