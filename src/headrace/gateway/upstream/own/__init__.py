"""Answers requests with our own engines: text to token ids, a choice of replica, attempts, and token ids back to text."""
