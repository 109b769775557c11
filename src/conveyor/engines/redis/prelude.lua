-- Stands before every script. ARGV[1] is the time that a test wants it to be; empty: the server's own clock.
-- Times are microseconds since 1970, which a number of Lua holds exactly.

local function server_clock()
    local time = redis.call('TIME')
    return time[1] * 1000000 + time[2]
end

local testing = ARGV[1] ~= ''
local now = testing and tonumber(ARGV[1]) or server_clock()

-- Lua's own text of a large number has an exponent and too few digits.
local function text(number)
    return string.format('%.0f', number)
end

-- Scripts compare times themselves. That a key expires only gives its memory back, a while later: on a clock that a
-- test moves, the server knows nothing of it.
local function keep(key, micros)
    local millis = math.min(math.ceil(micros / 1000) + (testing and 3600000 or 60000), 1e13)
    if redis.call('PTTL', key) < millis then
        redis.call('PEXPIRE', key, text(millis))
    end
end
