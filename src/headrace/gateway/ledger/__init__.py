"""One record per request of what it used: spooled to disk, shipped to SQL, Kafka or ClickHouse. docs/usage.md says how and why."""
