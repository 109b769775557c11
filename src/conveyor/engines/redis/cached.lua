-- KEYS: the value.
local kept = redis.call('HMGET', KEYS[1], 'value', 'ends')
if kept[1] and tonumber(kept[2]) > now then
    return kept[1]
end
return false
