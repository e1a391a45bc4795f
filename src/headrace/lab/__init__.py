"""The lab: load generator and fake engine on the real loop."""
