-- KEYS: answers, the value. ARGV: number, done, 1 if there is an old value, the old value, the new one, ttl.
-- Returns whether it was swapped, as text.
local earlier = earlier_answer()
if earlier then
    return earlier
end
local ttl = tonumber(ARGV[7])

local kept = redis.call('HMGET', KEYS[2], 'value', 'ends')
local value = kept[1]
if value and tonumber(kept[2]) <= now then
    value = false
end
local expected = ARGV[4] == '1' and ARGV[5]
if value ~= expected then
    return remember('0')
end
redis.call('HSET', KEYS[2], 'value', ARGV[6], 'ends', text(now + ttl))
redis.call('PERSIST', KEYS[2])
keep(KEYS[2], ttl)
return remember('1')
