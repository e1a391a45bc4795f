"""What tenants may use: tiers, prices. Pure values and decisions; where counts are kept is `gateway`'s (docs/tenancy.md)."""
