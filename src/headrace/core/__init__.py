"""Types that every floor shares: ids, requests, sampling rules, finish reasons, errors, block hashes, the clock, plan and result.

Imports nothing but the standard library, reads no clock, opens nothing. Rules live here once (`SamplingParams.checked`);
front ends only decode.
"""
