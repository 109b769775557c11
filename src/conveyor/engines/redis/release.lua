-- KEYS: leases by name, their names, when they end. ARGV: name, holder, fence. The fence stays, for the next grant.
local name, holder = ARGV[2], ARGV[3]

local found = redis.call('HGET', KEYS[1], name)
if found then
    local fence, _, owner = string.match(found, '^(%d+) (%d+) (.*)$')
    if owner == holder and fence == ARGV[4] then
        redis.call('HSET', KEYS[1], name, fence .. ' 0 ' .. holder)
        redis.call('ZADD', KEYS[3], text(now), name)
    end
end
return 1
