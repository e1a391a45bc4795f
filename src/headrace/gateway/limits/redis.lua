-- The book of limits in Redis: what `policy.limits.book` does, call by call. `limits.redis` calls it, and describes the keys.
--
-- KEYS[1] begins all keys. ARGV[1] is the name of the call; what follows stands at the head of each.

local P = KEYS[1]
local MINUTE_MS, DAY_MS = 60000, 86400000

-- A number without an exponent, which the encoder of JSON in Redis writes for large ones.
local function text(number) return string.format('%.0f', number) end

-- given: milliseconds, of tests; '': the server's clock.
local function now_ms(given)
  if given ~= '' then return tonumber(given) end
  local time = redis.call('TIME')
  return time[1] * 1000 + math.floor(time[2] / 1000)
end

-- `policy.limits.counters.month_of`: the month is that of the server's clock, which its caller does not know.
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
  if window == 'minute' then return math.floor(steady / MINUTE_MS) end
  local day = math.floor(unix / DAY_MS)
  return window == 'day' and day or month_of(day)
end

local function change(counter, bucket, amount)
  local key = P .. 'used:' .. counter
  bucket = text(bucket)
  if redis.call('HEXISTS', key, bucket) == 0 then return end
  if redis.call('HINCRBY', key, bucket, text(amount)) < 0 then redis.call('HSET', key, bucket, 0) end
end

-- taken: {counter, bucket, unit, amount} each; used: an amount per unit.
local function replace(taken, used)
  local charged = {}
  for _, one in ipairs(taken) do
    local amount = charged[one[1]] and 0 or used[one[3] + 1]
    charged[one[1]] = true
    change(one[1], one[2], amount - one[4])
    one[4] = amount
  end
end

local function amounts(joined)
  local found = {}
  for number in string.gmatch(joined, '[^,]+') do found[#found + 1] = tonumber(number) end
  return found
end

local function encode(beat, taken)
  local parts = {}
  for _, one in ipairs(taken) do
    parts[#parts + 1] = '[' .. cjson.encode(one[1]) .. ',' .. text(one[2]) .. ',' .. text(one[3]) .. ',' .. text(one[4]) .. ']'
  end
  return '[' .. text(beat) .. ',[' .. table.concat(parts, ',') .. ']]'
end

local function charge_one(gateway, id, used)
  for _, key in ipairs({P .. 'held:' .. gateway, P .. 'late'}) do
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

-- first, last: places in ARGV of reservations, each followed by its amounts
local function charge_all(gateway, first, last)
  for place = first, last, 2 do charge_one(gateway, ARGV[place], amounts(ARGV[place + 1])) end
end

-- Makes room for a new bucket of a counter.
local function drop_oldest(key)
  local oldest
  for _, kept in ipairs(redis.call('HKEYS', key)) do
    if not oldest or tonumber(kept) < oldest then oldest = tonumber(kept) end
  end
  redis.call('HDEL', key, text(oldest))
end

-- Records the amounts in the reservation, which may have taken others before.
local function hold(gateway, id, beat, saved, taken)
  local made = redis.call('HGET', P .. 'held:' .. gateway, id)
  redis.call('HSETNX', P .. 'gateways', gateway, beat)
  if made then
    local before = cjson.decode(made)
    for _, one in ipairs(taken) do table.insert(before[2], one) end
    beat, taken = before[1], before[2]
  end
  redis.call('HSET', P .. 'held:' .. gateway, id, encode(tonumber(beat), taken))
  redis.call('HSET', P .. 'saved:' .. gateway, id, saved)
end

local call = {}

-- steady, unix, most buckets of a counter, ms that one of minutes is kept for; reservation, gateway, beat, saved;
-- gateway that charges, number of its reservations; those with amounts; claims of five: counter, window, unit, limit, amount
function call.take()
  local steady, unix, kept_buckets = now_ms(ARGV[2]), now_ms(ARGV[3]), tonumber(ARGV[4])
  local answer, taken, windows, is_over = {0, text(steady), text(unix)}, {}, {}, false
  local first_claim = 12 + 2 * tonumber(ARGV[11])
  charge_all(ARGV[10], 12, first_claim - 1)
  for first = first_claim, #ARGV, 5 do
    local counter, window, unit = ARGV[first], ARGV[first + 1], tonumber(ARGV[first + 2])
    local limit, amount = tonumber(ARGV[first + 3]), tonumber(ARGV[first + 4])
    local key, bucket = P .. 'used:' .. counter, bucket_of(window, steady, unix)
    local current = tonumber(redis.call('HGET', key, text(bucket)) or 0)
    local previous = window == 'minute' and tonumber(redis.call('HGET', key, text(bucket - 1)) or 0) or 0
    answer[#answer + 1] = text(current)
    answer[#answer + 1] = text(previous)
    if amount then
      local used = current
      if previous > 0 then used = used + math.ceil(previous * (MINUTE_MS - steady % MINUTE_MS) / MINUTE_MS) end
      if amount > 0 and used + amount > limit then is_over = true end
      taken[#taken + 1] = {counter, bucket, unit, amount}
      windows[#taken] = window
    end
  end
  if is_over then return answer end
  answer[1] = 1
  for number, one in ipairs(taken) do
    local key, bucket = P .. 'used:' .. one[1], text(one[2])
    if redis.call('HEXISTS', key, bucket) == 0 and redis.call('HLEN', key) >= kept_buckets then drop_oldest(key) end
    redis.call('HINCRBY', key, bucket, text(one[4]))
    if windows[number] == 'minute' then redis.call('PEXPIRE', key, ARGV[5]) end
  end
  if ARGV[6] ~= '' then hold(ARGV[7], ARGV[6], ARGV[8], ARGV[9], taken) end
  return answer
end

-- gateway; reservations with amounts
function call.charge()
  charge_all(ARGV[2], 3, #ARGV)
end

-- now, gateway, beat; beats for which a reservation need not be named, ms that a late one is kept, most of those removed at once;
-- amounts of a reservation that was given up; reservations with what to save
function call.renew()
  local now, gateway, beat = now_ms(ARGV[2]), ARGV[3], tonumber(ARGV[4])
  redis.call('HSET', P .. 'gateways', gateway, ARGV[4])
  local held, named = P .. 'held:' .. gateway, {}
  for first = 9, #ARGV, 2 do
    named[ARGV[first]] = true
    if redis.call('HEXISTS', held, ARGV[first]) == 1 then redis.call('HSET', P .. 'saved:' .. gateway, ARGV[first], ARGV[first + 1]) end
  end
  for _, id in ipairs(redis.call('HKEYS', held)) do
    if not named[id] and cjson.decode(redis.call('HGET', held, id))[1] <= beat - ARGV[5] then
      charge_one(gateway, id, amounts(ARGV[8]))
    end
  end
  for _, range in ipairs({{'-inf', text(now - ARGV[6])}, {'(' .. text(now), '+inf'}}) do
    for _, id in ipairs(redis.call('ZRANGEBYSCORE', P .. 'late_at', range[1], range[2], 'LIMIT', 0, ARGV[7])) do
      redis.call('ZREM', P .. 'late_at', id)
      redis.call('HDEL', P .. 'late', id)
    end
  end
  return redis.call('HGETALL', P .. 'gateways')
end

-- now, gateway, beat
function call.expire()
  local now, gateway = now_ms(ARGV[2]), ARGV[3]
  if redis.call('HGET', P .. 'gateways', gateway) ~= ARGV[4] then return 0 end
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
end

return call[ARGV[1]]()
