"""Simulates a site: the real scheduler, queues, admission and choice of replicas on virtual time, over steps whose times are computed.

The command is `headrace simulate`. docs/simulation.md says what is simulated, and how near it comes to a real site.
"""
