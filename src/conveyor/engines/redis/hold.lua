-- KEYS: what each holder holds. ARGV: holder, want, limit, ttl. Returns what it holds then.
-- Each holder has a lease of its own: of those that died, as much is free again as they held.
local holder, want, limit, ttl = ARGV[2], tonumber(ARGV[3]), tonumber(ARGV[4]), tonumber(ARGV[5])
-- Nobody is granted more than its ttl, which may differ by holder, but not by an hour. One that lasts longer was granted
-- when this server's clock was ahead.
local latest = now + math.max(ttl, 3600000000) + 60000000

local others = 0
local all = redis.call('HGETALL', KEYS[1])
for at = 1, #all, 2 do
    local count, ends = string.match(all[at + 1], '^(%d+) (%d+)$')
    if tonumber(ends) <= now or tonumber(ends) > latest then
        redis.call('HDEL', KEYS[1], all[at])
    elseif all[at] ~= holder then
        others = others + tonumber(count)
    end
end

local granted = math.max(0, math.min(want, limit - others))
if granted > 0 then
    redis.call('HSET', KEYS[1], holder, text(granted) .. ' ' .. text(now + ttl))
    keep(KEYS[1], ttl)
else
    redis.call('HDEL', KEYS[1], holder)
end
return granted
