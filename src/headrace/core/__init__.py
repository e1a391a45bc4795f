"""Types that every floor shares."""
