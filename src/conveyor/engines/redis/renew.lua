-- KEYS: leases by name, their names, when they end. ARGV: name, holder, fence, ttl. Returns whether it was still held.
local name, holder, ttl = ARGV[2], ARGV[3], tonumber(ARGV[5])

local found = redis.call('HGET', KEYS[1], name)
if not found then
    return 0
end
local fence, ends, owner = string.match(found, '^(%d+) (%d+) (.*)$')
if owner ~= holder or fence ~= ARGV[4] or tonumber(ends) <= now then
    return 0
end
redis.call('HSET', KEYS[1], name, fence .. ' ' .. text(now + ttl) .. ' ' .. holder)
redis.call('ZADD', KEYS[3], text(now + ttl), name)
return 1
