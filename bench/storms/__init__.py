"""Storms: what many hostile or heavy requests at once do to a server, its memory and their neighbours."""
