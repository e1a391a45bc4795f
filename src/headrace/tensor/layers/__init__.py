"""Building blocks of decoders: weights on their way in, attention, feed-forward, experts, rotary tables.

A block is given numbers (a spec) and tensor names; what differs between architectures is in `tensor.models`.
"""
