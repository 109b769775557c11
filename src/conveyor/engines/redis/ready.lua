-- Stands before the scripts of the ready index. KEYS[1] is the prefix of its keys, with one hash tag for all of them:
--   <prefix>:runs           a hash from each run to its entry; the field '' is set once the index was filled
--   <prefix>:due:<tenant>   the tenant's listed runs without a worker, by the time when they are due
--   <prefix>:help:<tenant>  its runs whose workers asked for help, by that time
--   <prefix>:tenants        tenants with listed runs, by the time when the first is due
--   <prefix>:served         a hash from tenants to their last turn
--   <prefix>:workers        workers, by the time when their seats expire
--   <prefix>:seats:<worker>, <prefix>:changed:<worker>   its runs; changes of them, by number
--   <prefix>:numbers        the last change and the last turn
-- An entry: tenant, job, times when messages are due (sorted), pause, workers with a seat, time of a call for help,
-- whether the run has finished, time at which to look at it again. A time of 0 is none. Scripts are repeated after a broken connection: a worker that has more seats than
-- it knows, or fewer, is told all of them.
local MAX_DUE_TIMES = 16
local DAY = 86400000000
local TENANT, JOB, TIMES, PAUSE, SEATS, HELP, FINISHED, RECHECK = 1, 2, 3, 4, 5, 6, 7, 8

local base = KEYS[1]
local RUNS, TENANTS, SERVED = base .. ':runs', base .. ':tenants', base .. ':served'
local WORKERS, NUMBERS = base .. ':workers', base .. ':numbers'

local function due_of(tenant) return base .. ':due:' .. tenant end
local function help_of(tenant) return base .. ':help:' .. tenant end
local function seats_of(worker) return base .. ':seats:' .. worker end
local function changes_of(worker) return base .. ':changed:' .. worker end

local function new_entry(tenant, job)
    return {tenant, job, {}, 0, {}, 0, 0, 0}
end

local function entry_of(run)
    local packed = redis.call('HGET', RUNS, run)
    return packed and cmsgpack.unpack(packed) or nil
end

-- From the server's clock, so that numbers grow when all of this was lost.
local function next_number(name)
    local number = math.max((tonumber(redis.call('HGET', NUMBERS, name)) or 0) + 1, server_clock())
    redis.call('HSET', NUMBERS, name, text(number))
    return number
end

local function add_due(entry, at)
    local times = entry[TIMES]
    if at <= now and times[1] and times[1] <= now then
        return
    end
    local place = #times + 1
    while place > 1 and times[place - 1] >= at do
        if times[place - 1] == at then
            return
        end
        place = place - 1
    end
    table.insert(times, place, at)
    if #times > MAX_DUE_TIMES then
        local closest, least = 2, math.huge
        for i = 2, #times - 1 do
            -- A time that has passed is as good as the first.
            local span = times[i] <= now and 0 or (times[i + 1] - times[i - 1]) / (times[i] - now + 1000000)
            if span < least then
                closest, least = i, span
            end
        end
        table.remove(times, closest)
    end
end

local function list_tenant(tenant)
    local first = redis.call('ZRANGE', due_of(tenant), 0, 0, 'WITHSCORES')[2]
    local help = redis.call('ZRANGE', help_of(tenant), 0, 0, 'WITHSCORES')[2]
    if help and (not first or tonumber(help) < tonumber(first)) then
        first = help
    end
    if first then
        redis.call('ZADD', TENANTS, first, tenant)
    else
        redis.call('ZREM', TENANTS, tenant)
        redis.call('HDEL', SERVED, tenant)
    end
end

local function unlist(run, tenant)
    if redis.call('ZREM', due_of(tenant), run) + redis.call('ZREM', help_of(tenant), run) > 0 then
        list_tenant(tenant)
    end
end

-- Stores the entry, and lists the run at the time that it says, or not at all.
local function store(run, entry)
    local seats = #entry[SEATS]
    if entry[FINISHED] == 1 and seats == 0 then
        redis.call('HDEL', RUNS, run)
        return unlist(run, entry[TENANT])
    end
    redis.call('HSET', RUNS, run, cmsgpack.pack(entry))
    local at = entry[TIMES][1]
    if entry[RECHECK] > 0 and (not at or entry[RECHECK] < at) then
        at = entry[RECHECK]
    end
    if seats > 0 then
        at = entry[HELP] > 0 and entry[HELP] or nil
    end
    if entry[FINISHED] == 1 or not at then
        return unlist(run, entry[TENANT])
    end
    local here, other = due_of(entry[TENANT]), help_of(entry[TENANT])
    if seats > 0 then
        here, other = other, here
    end
    redis.call('ZREM', other, run)
    redis.call('ZADD', here, text(at), run)
    list_tenant(entry[TENANT])
    keep(here, DAY)
end

local function has_seat(entry, worker)
    for place, holder in ipairs(entry[SEATS]) do
        if holder == worker then
            return place
        end
    end
    return nil
end

local function keep_all()
    for _, key in ipairs({RUNS, TENANTS, SERVED, WORKERS, NUMBERS}) do
        keep(key, DAY)
    end
end
