"""Keeps account of KV blocks: their owners, and which of them may be reused.

`pool` has the blocks of one group, `leases` the owners that are no sequences, `manager` a sequence's view over all groups.
"""
