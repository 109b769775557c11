-- ARGV: the request, as LookRequest lists its fields. Returns the answer, as Look lists them.
local holder, ttl, visibility, news, seat_count, since, limit, overdue, skipped, unjoined, unjoined_overdue =
    unpack(cmsgpack.unpack(ARGV[2]))
local LEAVE, HELP_ME, CLAIM, FINISH = 0, 1, 2, 3
-- Dead workers whose seats one look frees.
local DEAD_AT_ONCE = 5
-- Due tenants among which one look chooses. While a server runs a script it answers nobody else.
local CANDIDATES = 256

local function seated(run, entry)
    return {run, entry[TENANT], entry[JOB], entry[PAUSE]}
end

local function free_seats_of(worker)
    for _, run in ipairs(redis.call('SMEMBERS', seats_of(worker))) do
        local entry = entry_of(run)
        local place = entry and has_seat(entry, worker)
        if place then
            table.remove(entry[SEATS], place)
            -- What waits in the queue is due now; what the dead worker had in flight is visible later.
            add_due(entry, now)
            add_due(entry, now + math.floor(visibility * 1000000))
            store(run, entry)
        end
    end
    redis.call('DEL', seats_of(worker), changes_of(worker))
    redis.call('ZREM', WORKERS, worker)
end

for _, worker in ipairs(redis.call('ZRANGEBYSCORE', WORKERS, '-inf', text(now), 'LIMIT', 0, DEAD_AT_ONCE)) do
    free_seats_of(worker)
end
redis.call('ZADD', WORKERS, text(now + math.floor(ttl * 1000000)), holder)

local function leave(run, entry, delay, pause)
    local place = has_seat(entry, holder)
    if place then
        table.remove(entry[SEATS], place)
    end
    redis.call('SREM', seats_of(holder), run)
    redis.call('ZREM', changes_of(holder), run)
    entry[PAUSE] = pause
    entry[RECHECK] = delay < math.huge and now + math.floor(delay * 1000000) or 0
end

local function claim(run, entry)
    if not has_seat(entry, holder) then
        table.insert(entry[SEATS], holder)
    end
    redis.call('SADD', seats_of(holder), run)
end

for _, each in ipairs(news) do
    local run, action, delay, pause, tenant, job = unpack(each)
    local entry = entry_of(run)
    if not entry and action == CLAIM then
        entry = new_entry(tenant, job)
    end
    if entry then
        if action == LEAVE or action == FINISH then
            entry[FINISHED] = action == FINISH and 1 or entry[FINISHED]
            leave(run, entry, delay, pause)
        elseif action == CLAIM then
            claim(run, entry)
        elseif action == HELP_ME and entry[HELP] == 0 then
            entry[HELP] = now
        end
        store(run, entry)
    else
        redis.call('SREM', seats_of(holder), run)
    end
end

redis.call('ZREMRANGEBYSCORE', changes_of(holder), '-inf', text(since))
local changed, seen = {}, since
local listed = redis.call('ZRANGE', changes_of(holder), 0, -1, 'WITHSCORES')
for at = 1, #listed, 2 do
    changed[#changed + 1] = listed[at]
    seen = tonumber(listed[at + 1])
end

local seats = nil
if redis.call('SCARD', seats_of(holder)) ~= seat_count then
    seats = {}
    for _, run in ipairs(redis.call('SMEMBERS', seats_of(holder))) do
        local entry = entry_of(run)
        if entry then
            seats[#seats + 1] = seated(run, entry)
        else
            redis.call('SREM', seats_of(holder), run)
        end
    end
end

local is_skipped, is_unjoined = {}, {}
for _, run in ipairs(skipped) do is_skipped[run] = true end
for _, tenant in ipairs(unjoined) do is_unjoined[tenant] = true end

local latest = text(now - math.floor(overdue * 1000000))
local latest_unjoined = unjoined_overdue and text(now - math.floor(unjoined_overdue * 1000000)) or latest
local latest_of_any = (unjoined_overdue or overdue) < overdue and latest_unjoined or latest
local taken = {}
-- The place in each list of its first run that was not passed over.
local places = {}

local function may_take(run, entry)
    if not entry or is_skipped[run] then
        return false
    end
    return #entry[SEATS] == 0 or not (has_seat(entry, holder) or is_unjoined[entry[TENANT]])
end

local function next_in(list, until_then)
    local first = redis.call('ZRANGEBYSCORE', list, '-inf', until_then, 'WITHSCORES', 'LIMIT', places[list] or 0, 1)
    return first[1], tonumber(first[2])
end

local function take_of(tenant)
    local until_then = is_unjoined[tenant] and latest_unjoined or latest
    while true do
        local list = due_of(tenant)
        local run, at = next_in(list, until_then)
        -- The worker passes by all runs that it may not join.
        if not is_unjoined[tenant] then
            local joined, asked = next_in(help_of(tenant), until_then)
            if joined and (not run or asked < at) then
                list, run = help_of(tenant), joined
            end
        end
        if not run then
            return false
        end
        local entry = entry_of(run)
        if may_take(run, entry) then
            table.insert(entry[SEATS], holder)
            redis.call('SADD', seats_of(holder), run)
            entry[HELP], entry[RECHECK] = 0, 0
            while entry[TIMES][1] and entry[TIMES][1] <= now do
                table.remove(entry[TIMES], 1)
            end
            store(run, entry)
            taken[#taken + 1] = seated(run, entry)
            if redis.call('ZSCORE', TENANTS, tenant) then
                redis.call('HSET', SERVED, tenant, text(next_number('turn')))
            end
            return true
        elseif entry then
            places[list] = (places[list] or 0) + 1
        else
            unlist(run, tenant)
        end
    end
end

-- Of the due tenants: all, or of more than CANDIDATES a quarter each of those that have waited for longest and of the
-- newest, and others from a place that changes with every look.
local function candidates()
    local count = redis.call('ZCOUNT', TENANTS, '-inf', latest_of_any)
    if count == 0 then
        return {}
    elseif count <= CANDIDATES then
        return redis.call('ZRANGE', TENANTS, 0, count - 1)
    end
    local quarter = CANDIDATES / 4
    local from = quarter + now % (count - CANDIDATES + 1)
    local found = redis.call('ZRANGE', TENANTS, 0, quarter - 1)
    for _, bounds in ipairs({{from, from + 2 * quarter - 1}, {count - quarter, count - 1}}) do
        for _, tenant in ipairs(redis.call('ZRANGE', TENANTS, bounds[1], bounds[2])) do
            found[#found + 1] = tenant
        end
    end
    return found
end

-- The least recently served first: sorted as text, which takes a fraction of the time of a comparison in Lua.
local function in_turn(tenants)
    local turns = redis.call('HMGET', SERVED, unpack(tenants))
    for place, tenant in ipairs(tenants) do
        tenants[place] = string.format('%017.0f', tonumber(turns[place] or 0)) .. tenant
    end
    table.sort(tenants)
    for place, tenant in ipairs(tenants) do
        tenants[place] = string.sub(tenant, 18)
    end
    return tenants
end

if limit > 0 then
    local tenants = candidates()
    if #tenants > 0 then
        tenants = in_turn(tenants)
    end
    while #tenants > 0 and #taken < limit do
        local again = {}
        for _, tenant in ipairs(tenants) do
            if #taken < limit and take_of(tenant) then
                again[#again + 1] = tenant
            end
        end
        tenants = again
    end
end

if ttl <= 0 and redis.call('SCARD', seats_of(holder)) == 0 then
    redis.call('ZREM', WORKERS, holder)
    redis.call('DEL', changes_of(holder))
else
    keep(seats_of(holder), DAY)
end
keep_all()
local is_built = redis.call('HEXISTS', RUNS, '') == 1
local answer = {taken, changed, seen, is_built}
if seats then
    answer[5] = seats
end
return cmsgpack.pack(answer)
