"""The simulator: the real scheduler, queues, admission and choice of replicas on virtual time, over steps whose times are computed.

The command: `headrace simulate`. What is simulated, and how near it comes: docs/simulation.md.
"""
