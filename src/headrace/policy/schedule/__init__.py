"""Schedules: holds the sequences, plans a step, and decides what a finished step means."""
