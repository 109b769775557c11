-- KEYS: answers, the bucket. ARGV: number, done, count, microseconds for each pass, burst.
-- Returns the microseconds to wait, as text.
local earlier = earlier_answer()
if earlier then
    return earlier
end
local count, step, burst = tonumber(ARGV[4]), tonumber(ARGV[5]), tonumber(ARGV[6])

-- When the next pass is due: `ahead` of a moment at which the bucket was full. Small numbers add up exactly enough;
-- times since 1970 would not.
local bucket = redis.call('HMGET', KEYS[2], 'since', 'ahead')
local since, ahead = tonumber(bucket[1]), tonumber(bucket[2])
if not since or since + ahead <= now then
    since, ahead = now, 0
end
local due = since - now + ahead
redis.call('HSET', KEYS[2], 'since', text(since), 'ahead', string.format('%.17g', ahead + count * step))
keep(KEYS[2], due + count * step)
return remember(string.format('%.17g', math.max(0, due - (burst - count) * step)))
