-- KEYS: answers, the counters, the additions that have a name. ARGV: number, done, ttl, name of this addition or
-- empty, then counters and amounts in turn. Returns counters and their values in turn.
local ttl, once = tonumber(ARGV[4]), ARGV[5]

local ends = tonumber(redis.call('HGET', KEYS[2], 'ends'))
if ends and ends <= now then
    redis.call('DEL', KEYS[2], KEYS[3])
end

local function add()
    if once ~= '' then
        redis.call('ZREMRANGEBYSCORE', KEYS[3], '-inf', text(now))
        if redis.call('ZSCORE', KEYS[3], once) then
            return
        end
        redis.call('ZADD', KEYS[3], text(now + ttl), once)
        keep(KEYS[3], ttl)
    end
    for at = 6, #ARGV, 2 do
        redis.call('HINCRBY', KEYS[2], ':' .. ARGV[at], ARGV[at + 1])
    end
    redis.call('HSET', KEYS[2], 'ends', text(now + ttl))
    keep(KEYS[2], ttl)
end

if #ARGV > 5 and not earlier_answer() then
    add()
    remember('')
end

local shown = {}
local all = redis.call('HGETALL', KEYS[2])
for at = 1, #all, 2 do
    if all[at] ~= 'ends' then
        shown[#shown + 1] = string.sub(all[at], 2)
        shown[#shown + 1] = all[at + 1]
    end
end
return shown
