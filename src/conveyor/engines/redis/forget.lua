-- KEYS: leases by name, their names, when they end. ARGV: prefix.
while true do
    -- No byte of UTF-8 is 255, so this is past every name that goes on from the prefix.
    local names = redis.call('ZRANGEBYLEX', KEYS[2], '[' .. ARGV[2], '[' .. ARGV[2] .. '\255', 'LIMIT', 0, 1000)
    if #names == 0 then
        return 1
    end
    redis.call('HDEL', KEYS[1], unpack(names))
    redis.call('ZREM', KEYS[2], unpack(names))
    redis.call('ZREM', KEYS[3], unpack(names))
end
