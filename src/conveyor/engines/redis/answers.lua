-- Stands before scripts that must not be carried out twice. A caller whose connection broke cannot know whether its
-- call was carried out, and sends it again under the same number. KEYS[1] keeps the answers that the caller may still
-- ask for, of its calls about one key, beside that key: they move with it from node to node. The caller numbers its
-- calls, ARGV[2], and says below which it has all its answers about this key, ARGV[3].

local function earlier_answer()
    local low = tonumber(redis.call('HGET', KEYS[1], 'low'))
    local number, done = tonumber(ARGV[2]), tonumber(ARGV[3])
    if low and number < low then
        -- A delayed first attempt: the second has been answered already.
        return ''
    end
    if not low or low < done then
        for _, each in ipairs(low and redis.call('HKEYS', KEYS[1]) or {}) do
            if each ~= 'low' and tonumber(each) < done then
                redis.call('HDEL', KEYS[1], each)
            end
        end
        redis.call('HSET', KEYS[1], 'low', text(done))
    end
    return redis.call('HGET', KEYS[1], ARGV[2])
end

local function remember(answer)
    redis.call('HSET', KEYS[1], ARGV[2], answer)
    redis.call('PEXPIRE', KEYS[1], 60000)
    return answer
end
