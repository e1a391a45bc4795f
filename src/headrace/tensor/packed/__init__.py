"""Packed weights kept on disk between two starts."""
