-- The calls of `stores.redis` that change a value together with what lies beside it: size, tenant and age.
--
-- KEYS[1] begins all keys of the store. entry:KEY is a value; sizes and tenants map a key to size and tenant; bytes maps a tenant to the
-- sum of its sizes, total is the sum of all; ends are keys by the time at which they are over; ages and ages:TENANT are keys by the number
-- of their write. A server that evicts keys may take any of them: a sum of entries of which the ages know nothing begins anew.
-- ARGV[1] is the name of the call; what follows stands at the head of each.

local P = KEYS[1]

local function add_bytes(tenant, bytes)
  if redis.call('HINCRBY', P .. 'bytes', tenant, bytes) == 0 then redis.call('HDEL', P .. 'bytes', tenant) end
  redis.call('INCRBY', P .. 'total', bytes)
end

local function remove(key)
  redis.call('DEL', P .. 'entry:' .. key)
  redis.call('ZREM', P .. 'ends', key)
  redis.call('ZREM', P .. 'ages', key)
  local tenant = redis.call('HGET', P .. 'tenants', key)
  if not tenant then return end
  add_bytes(tenant, 0 - (redis.call('HGET', P .. 'sizes', key) or 0))
  redis.call('HDEL', P .. 'sizes', key)
  redis.call('HDEL', P .. 'tenants', key)
  redis.call('ZREM', P .. 'ages:' .. tenant, key)
end

local function make_room(ages, sum, max, forget)
  while sum() > max do
    local oldest = redis.call('ZRANGE', ages, 0, 0)[1]
    if not oldest then forget() return end
    remove(oldest)
    redis.call('ZREM', ages, oldest)
  end
end

local call = {}

-- key, tenant, value, ttl_ms, most bytes of a tenant, of all; bytes of this entry; nothing, or 'absent', or 'equal' and the present value
function call.put()
  local key, tenant, ttl_ms, size = ARGV[2], ARGV[3], tonumber(ARGV[5]), tonumber(ARGV[8])
  local max_tenant, max_total, mode, found = tonumber(ARGV[6]), tonumber(ARGV[7]), ARGV[9], redis.call('GET', P .. 'entry:' .. key)
  if mode == 'absent' and found or mode == 'equal' and found ~= ARGV[10] then return 0 end
  local time = redis.call('TIME')
  local now = time[1] * 1000 + math.floor(time[2] / 1000)
  for _, over in ipairs(redis.call('ZRANGEBYSCORE', P .. 'ends', '-inf', now, 'LIMIT', 0, 256)) do remove(over) end
  remove(key)
  make_room(P .. 'ages:' .. tenant,
    function() return tonumber(redis.call('HGET', P .. 'bytes', tenant) or 0) end, max_tenant - size,
    function() redis.call('HDEL', P .. 'bytes', tenant) end)
  make_room(P .. 'ages',
    function() return tonumber(redis.call('GET', P .. 'total') or 0) end, max_total - size,
    function() redis.call('DEL', P .. 'total', P .. 'bytes') end)
  redis.call('SET', P .. 'entry:' .. key, ARGV[4], 'PX', ttl_ms)
  redis.call('HSET', P .. 'sizes', key, size)
  redis.call('HSET', P .. 'tenants', key, tenant)
  redis.call('ZADD', P .. 'ends', now + ttl_ms, key)
  local number = redis.call('INCR', P .. 'writes')
  redis.call('ZADD', P .. 'ages', number, key)
  redis.call('ZADD', P .. 'ages:' .. tenant, number, key)
  add_bytes(tenant, size)
  return 1
end

-- key; perhaps the value that it must have
function call.delete()
  if not ARGV[3] or redis.call('GET', P .. 'entry:' .. ARGV[2]) == ARGV[3] then remove(ARGV[2]) end
end

-- tenant
function call.purge()
  local found = redis.call('ZRANGE', P .. 'ages:' .. ARGV[2], 0, 255)
  for _, key in ipairs(found) do
    remove(key)
    redis.call('ZREM', P .. 'ages:' .. ARGV[2], key)
  end
  return #found
end

return call[ARGV[1]]()
