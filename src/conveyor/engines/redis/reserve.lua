-- KEYS: answers, the bucket. ARGV: number, done, count, microseconds for each pass, burst, the longest wait.
-- Returns the microseconds to wait, as text; below 0 they are more than the longest, and nothing was reserved.
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
-- No reservation leads further ahead than this. One that does was made when this server's clock was ahead.
if ARGV[7] ~= 'inf' and due > tonumber(ARGV[7]) + math.max(burst, count) * step + 60000000 then
    since, ahead, due = now, 0, 0
end
local wait = math.max(0, due - (burst - count) * step)
if ARGV[7] ~= 'inf' and wait > tonumber(ARGV[7]) then
    return remember(string.format('%.17g', -wait))
end
redis.call('HSET', KEYS[2], 'since', text(since), 'ahead', string.format('%.17g', ahead + count * step))
keep(KEYS[2], due + count * step)
return remember(string.format('%.17g', wait))
