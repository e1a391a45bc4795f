"""Parses large bodies, renders templates and tokenizes in processes of their own, bounded in memory and time. docs/text.md says why."""
