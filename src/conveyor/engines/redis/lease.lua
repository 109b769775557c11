-- KEYS: leases by name, their names, when they end. ARGV: name, holder, ttl. Returns the fence, or 0.
local name, holder, ttl = ARGV[2], ARGV[3], tonumber(ARGV[4])

local last = 0
local found = redis.call('HGET', KEYS[1], name)
if found then
    local fence, ends, owner = string.match(found, '^(%d+) (%d+) (.*)$')
    -- One that lasts longer than a new one would, and a minute more, was granted when the clock was ahead.
    local is_held = tonumber(ends) > now and tonumber(ends) <= now + ttl + 60000000
    if is_held and owner ~= holder then
        return 0
    end
    last = tonumber(fence)
end

-- From the server's clock, so that a fence is greater than any before it when all of this was lost.
local fence = math.max(last + 1, server_clock())
redis.call('HSET', KEYS[1], name, text(fence) .. ' ' .. text(now + ttl) .. ' ' .. holder)
redis.call('ZADD', KEYS[2], 0, name)
redis.call('ZADD', KEYS[3], text(now + ttl), name)

-- What nobody asked for in a day and nobody told us to forget.
for _, old in ipairs(redis.call('ZRANGEBYSCORE', KEYS[3], '-inf', text(now - 86400000000), 'LIMIT', 0, 10)) do
    redis.call('HDEL', KEYS[1], old)
    redis.call('ZREM', KEYS[2], old)
    redis.call('ZREM', KEYS[3], old)
end
return fence
