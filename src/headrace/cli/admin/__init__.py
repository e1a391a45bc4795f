"""Commands about a running deployment, its keys, tenants, usage and certificates."""
