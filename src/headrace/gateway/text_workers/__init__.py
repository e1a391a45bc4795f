"""Bodies, templates and tokenizing in processes of their own, bounded in memory and time together. docs/text.md says why."""
