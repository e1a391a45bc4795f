"""The commands. Composes everything, imported by nobody."""
