-- ARGV: runs. Returns 1 or 0 for each.
local known = {}
for at = 2, #ARGV do
    known[#known + 1] = redis.call('HEXISTS', RUNS, ARGV[at])
end
return known
