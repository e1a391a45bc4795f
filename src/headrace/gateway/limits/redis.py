"""Keeps the book of limits in Redis (6.2 or later) or Valkey, which gateways on several machines share.

Each script does what the method of its name in `policy.limits.book` does; a script runs whole or not at all. Time is the server's. All keys
have one hash tag, so that a cluster keeps them on one node:

    limits:used:COUNTER     bucket -> used
    limits:held:GATEWAY     reservation -> its beat and what it has taken, as JSON
    limits:saved:GATEWAY    reservation -> what to charge when the gateway dies
    limits:gateways         gateway -> beat
    limits:late             reservation -> what it has taken, of gateways that were found dead
    limits:late_at          the same by time
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from headrace.gateway.stores.redis import PREFIX, RedisCalls
from headrace.policy.limits.book import (
    LATE_MS,
    MAX_LATE_REMOVED,
    NO_CHARGES,
    UNNAMED_BEATS,
    Charges,
    Claim,
    ClaimReading,
    Holder,
    TakeResult,
)
from headrace.policy.limits.counters import DAY_MS, KEPT_BUCKETS, MINUTE_MS, Amounts, Moment

IDLE_MINUTE_MS = 3 * MINUTE_MS
"""Milliseconds after which Redis forgets a counter of minutes that is not used: all its buckets lie behind by then."""

COMMON = f"""
local P = '{PREFIX}limits:'

local function text(number) return string.format('%.0f', number) end

local function now_ms(given)
  if given ~= '' then return tonumber(given) end
  local time = redis.call('TIME')
  return time[1] * 1000 + math.floor(time[2] / 1000)
end

local function month_of(day)
  day = day + 719468
  local era = math.floor(day / 146097)
  local of_era = day - era * 146097
  local year = math.floor((of_era - math.floor(of_era / 1460) + math.floor(of_era / 36524) - math.floor(of_era / 146096)) / 365)
  local of_year = of_era - (365 * year + math.floor(year / 4) - math.floor(year / 100))
  return (year + era * 400) * 12 + math.floor((5 * of_year + 2) / 153) + 2
end

local function bucket_of(window, steady, unix)
  if window == 'open' then return 0 end
  if window == 'minute' then return math.floor(steady / {MINUTE_MS}) end
  local day = math.floor(unix / {DAY_MS})
  return window == 'day' and day or month_of(day)
end

local function change(counter, bucket, amount)
  local key = P .. 'used:' .. counter
  bucket = text(bucket)
  if redis.call('HEXISTS', key, bucket) == 0 then return end
  if redis.call('HINCRBY', key, bucket, text(amount)) < 0 then redis.call('HSET', key, bucket, 0) end
end

local function replace(taken, used)
  local charged = {{}}
  for _, one in ipairs(taken) do
    local amount = charged[one[1]] and 0 or used[one[3] + 1]
    charged[one[1]] = true
    change(one[1], one[2], amount - one[4])
    one[4] = amount
  end
end

local function amounts(joined)
  local found = {{}}
  for number in string.gmatch(joined, '[^,]+') do found[#found + 1] = tonumber(number) end
  return found
end

local function encode(beat, taken)
  local parts = {{}}
  for _, one in ipairs(taken) do
    parts[#parts + 1] = '[' .. cjson.encode(one[1]) .. ',' .. text(one[2]) .. ',' .. text(one[3]) .. ',' .. text(one[4]) .. ']'
  end
  return '[' .. text(beat) .. ',[' .. table.concat(parts, ',') .. ']]'
end

local function charge(gateway, id, used)
  for _, key in ipairs({{P .. 'held:' .. gateway, P .. 'late'}}) do
    local found = redis.call('HGET', key, id)
    if found then
      replace(cjson.decode(found)[2], used)
      redis.call('HDEL', key, id)
      redis.call('HDEL', P .. 'saved:' .. gateway, id)
      redis.call('ZREM', P .. 'late_at', id)
      return
    end
  end
end
"""
"""`text` writes a number without an exponent, which the encoder of JSON in Redis does not for large ones."""

TAKE = (
    COMMON
    + f"""
local steady, unix = now_ms(ARGV[1]), now_ms(ARGV[2])
local id, gateway, beat, saved = ARGV[3], ARGV[4], tonumber(ARGV[5]), ARGV[6]
local answer, taken, windows, is_over = {{0, text(steady), text(unix)}}, {{}}, {{}}, false
local first_claim = 9 + 2 * tonumber(ARGV[8])
for first = 9, first_claim - 1, 2 do charge(ARGV[7], ARGV[first], amounts(ARGV[first + 1])) end
for first = first_claim, #ARGV, 5 do
  local counter, window, unit = ARGV[first], ARGV[first + 1], tonumber(ARGV[first + 2])
  local limit, amount = tonumber(ARGV[first + 3]), ARGV[first + 4]
  local bucket = bucket_of(window, steady, unix)
  local current = tonumber(redis.call('HGET', P .. 'used:' .. counter, text(bucket)) or 0)
  local previous = window == 'minute' and tonumber(redis.call('HGET', P .. 'used:' .. counter, text(bucket - 1)) or 0) or 0
  answer[#answer + 1] = text(current)
  answer[#answer + 1] = text(previous)
  if amount ~= '' then
    amount = tonumber(amount)
    local used = current
    if previous > 0 then used = used + math.ceil(previous * ({MINUTE_MS} - steady % {MINUTE_MS}) / {MINUTE_MS}) end
    if amount > 0 and used + amount > limit then is_over = true end
    taken[#taken + 1] = {{counter, bucket, unit, amount}}
    windows[#taken] = window
  end
end
if is_over then return answer end
answer[1] = 1
for number, one in ipairs(taken) do
  local key, bucket = P .. 'used:' .. one[1], text(one[2])
  if redis.call('HEXISTS', key, bucket) == 0 and redis.call('HLEN', key) >= {KEPT_BUCKETS} then
    local oldest
    for _, kept in ipairs(redis.call('HKEYS', key)) do
      if not oldest or tonumber(kept) < oldest then oldest = tonumber(kept) end
    end
    redis.call('HDEL', key, text(oldest))
  end
  redis.call('HINCRBY', key, bucket, text(one[4]))
  if windows[number] == 'minute' then redis.call('PEXPIRE', key, {IDLE_MINUTE_MS}) end
end
if id ~= '' then
  local made = redis.call('HGET', P .. 'held:' .. gateway, id)
  if made then
    local before = cjson.decode(made)
    for _, one in ipairs(taken) do table.insert(before[2], one) end
    beat, taken = before[1], before[2]
  end
  redis.call('HSET', P .. 'held:' .. gateway, id, encode(beat, taken))
  redis.call('HSET', P .. 'saved:' .. gateway, id, saved)
  redis.call('HSETNX', P .. 'gateways', gateway, ARGV[5])
end
return answer
"""
)

CHARGE = COMMON + "for first = 2, #ARGV, 2 do charge(ARGV[1], ARGV[first], amounts(ARGV[first + 1])) end"

RENEW = (
    COMMON
    + f"""
local now, gateway, beat = now_ms(ARGV[1]), ARGV[2], tonumber(ARGV[3])
redis.call('HSET', P .. 'gateways', gateway, ARGV[3])
local held, named = P .. 'held:' .. gateway, {{}}
for first = 4, #ARGV, 2 do
  named[ARGV[first]] = true
  if redis.call('HEXISTS', held, ARGV[first]) == 1 then redis.call('HSET', P .. 'saved:' .. gateway, ARGV[first], ARGV[first + 1]) end
end
for _, id in ipairs(redis.call('HKEYS', held)) do
  if not named[id] and cjson.decode(redis.call('HGET', held, id))[1] <= beat - {UNNAMED_BEATS} then
    charge(gateway, id, {{1, 0, 0, 0, 0, 0}})
  end
end
for _, range in ipairs({{{{'-inf', text(now - {LATE_MS})}}, {{'(' .. text(now), '+inf'}}}}) do
  for _, id in ipairs(redis.call('ZRANGEBYSCORE', P .. 'late_at', range[1], range[2], 'LIMIT', 0, {MAX_LATE_REMOVED})) do
    redis.call('ZREM', P .. 'late_at', id)
    redis.call('HDEL', P .. 'late', id)
  end
end
return redis.call('HGETALL', P .. 'gateways')
"""
)

EXPIRE = (
    COMMON
    + """
local now, gateway = now_ms(ARGV[1]), ARGV[2]
if redis.call('HGET', P .. 'gateways', gateway) ~= ARGV[3] then return 0 end
local held = redis.call('HGETALL', P .. 'held:' .. gateway)
for place = 1, #held, 2 do
  local id, found = held[place], cjson.decode(held[place + 1])
  replace(found[2], amounts(redis.call('HGET', P .. 'saved:' .. gateway, id)))
  redis.call('HSET', P .. 'late', id, encode(found[1], found[2]))
  redis.call('ZADD', P .. 'late_at', now, id)
end
redis.call('DEL', P .. 'held:' .. gateway, P .. 'saved:' .. gateway)
redis.call('HDEL', P .. 'gateways', gateway)
return #held / 2
"""
)


class RedisLimits(RedisCalls):
    """A `LimitStore`. It connects with the first call."""

    is_in_order = False
    """Calls at the same time are on several connections."""

    def __init__(self, client: Any, *, now: Moment | None = None) -> None:
        """client: what `open_redis` made; now: instead of the server's time, for tests"""
        super().__init__(client)
        self.now = now
        self._take, self._charge, self._renew, self._expire = [client.register_script(script) for script in (TAKE, CHARGE, RENEW, EXPIRE)]

    async def take(self, holder: Holder | None, claims: Sequence[Claim], charges: Charges = NO_CHARGES) -> TakeResult:
        held = ("", "", 0, "") if holder is None else (holder.id, holder.gateway, holder.beat, _joined(holder.saved))
        ended = (charges.gateway, len(charges.used), *_pairs(charges.used))
        wanted = [word for claim in claims for word in _words(claim)]
        script = self._take(args=[*self._times(), *held, *ended, *wanted])
        is_admitted, steady_ms, unix_ms, *counts = map(int, await self.answer(script))
        readings = tuple(map(ClaimReading, counts[::2], counts[1::2]))
        return TakeResult(bool(is_admitted), Moment(steady_ms, unix_ms), readings)

    async def charge(self, charges: Charges) -> None:
        await self.answer(self._charge(args=[charges.gateway, *_pairs(charges.used)]))

    async def renew(self, gateway: str, beat: int, saved: Mapping[str, Amounts]) -> dict[str, int]:
        found = await self.answer(self._renew(args=[self._times()[0], gateway, beat, *_pairs(saved)]))
        return {name.decode(): int(value) for name, value in zip(found[::2], found[1::2], strict=True)}

    async def expire(self, gateway: str, beat: int) -> int:
        return int(await self.answer(self._expire(args=[self._times()[0], gateway, beat])))

    def _times(self) -> tuple[int | str, int | str]:
        return ("", "") if self.now is None else self.now


def _joined(amounts: Amounts) -> str:
    return ",".join(map(str, amounts))


def _pairs(amounts: Mapping[str, Amounts]) -> Iterator[str]:
    for reservation_id, value in amounts.items():
        yield reservation_id
        yield _joined(value)


def _words(claim: Claim) -> Iterator[str | int]:
    yield from (claim.counter, claim.window.value, int(claim.unit), claim.limit)
    yield "" if claim.amount is None else claim.amount
