"""Admission: decides by load what becomes of a request to a busy model. Pure."""
