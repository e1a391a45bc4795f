"""Commands about hardware that is not there yet: `plan` and `simulate`."""
