-- KEYS: the value. ARGV: value, ttl.
redis.call('HSET', KEYS[1], 'value', ARGV[2], 'ends', text(now + tonumber(ARGV[3])))
redis.call('PERSIST', KEYS[1])
keep(KEYS[1], tonumber(ARGV[3]))
return 1
