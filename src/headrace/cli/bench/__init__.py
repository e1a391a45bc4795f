"""`headrace bench serve|sweep|throughput|latency|steps` measures servers and engines, with the names and formulas of vLLM's tools.

Every JSON result has the commit, the machine, the load average, and the read bandwidth before and after the run. `lab.metrics` and
`lab.offline` compute the figures.
"""
