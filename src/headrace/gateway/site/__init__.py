"""The gateway workers of one port: which one this is, and what they tell one another."""
