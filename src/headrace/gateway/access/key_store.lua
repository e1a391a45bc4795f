-- The calls of `access.key_store`. KEYS: version, records, digests, tenants, audit. ARGV[1] is the name of the call.

local version, records, digests, tenants, audit = unpack(KEYS)
local call = {}

-- digest
function call.find()
  local number = redis.call('GET', version) or '0'
  local id = redis.call('HGET', digests, ARGV[2])
  local record = id and redis.call('HGET', records, id)
  local tenant = record and redis.call('HGET', tenants, cjson.decode(record).tenant)
  return tenant and {number, record, tenant} or {number}
end

-- change, as JSON
function call.apply()
  local change = cjson.decode(ARGV[2])
  if (redis.call('GET', version) or '0') ~= change.expected then return 0 end
  redis.call('SET', version, change.version)
  for _, digest in ipairs(change.removed_digests) do redis.call('HDEL', digests, digest) end
  for _, key in ipairs(change.keys) do
    redis.call('HSET', records, key.id, key.record)
    for _, digest in ipairs(key.digests) do redis.call('HSET', digests, digest, key.id) end
  end
  for _, name in ipairs(change.removed_tenants) do redis.call('HDEL', tenants, name) end
  for _, tenant in ipairs(change.tenants) do redis.call('HSET', tenants, tenant.name, tenant.record) end
  redis.call('RPUSH', audit, change.audit)
  return 1
end

return call[ARGV[1]]()
