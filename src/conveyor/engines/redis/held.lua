-- KEYS: what each holder holds. Returns what they hold together.
local sum = 0
for _, held in ipairs(redis.call('HVALS', KEYS[1])) do
    local count, ends = string.match(held, '^(%d+) (%d+)$')
    if tonumber(ends) > now then
        sum = sum + tonumber(count)
    end
end
return sum
