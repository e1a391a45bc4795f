"""KV blocks: their owners, and which of them may be reused.

`pool` is one group's blocks, `leases` the owners that are no sequences, `manager` a sequence's view over all groups.
"""
