"""The fleet: launchers, supervision, health."""
