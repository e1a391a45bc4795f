"""The wire: protos, generated messages, codec between core values and frames."""
