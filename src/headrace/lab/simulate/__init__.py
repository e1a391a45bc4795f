"""Simulates a site on virtual time (`headrace simulate`). docs/simulation.md says how near it comes to a real one."""
