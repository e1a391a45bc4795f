"""Records what each request used: one record per request, spooled to disk and shipped to SQLite, Kafka or ClickHouse (docs/usage.md)."""
