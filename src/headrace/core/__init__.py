"""Types that every floor shares: ids, requests, sampling rules, finish reasons, errors, block hashes, the clock, plan and result."""
