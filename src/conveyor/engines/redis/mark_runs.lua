-- ARGV: the marks, each a list of run, tenant, job, delay or infinity, changed, finished, restored; and whether the
-- index is filled now.
for _, mark in ipairs(cmsgpack.unpack(ARGV[2])) do
    local run, tenant, job, delay, changed, finished, restored = unpack(mark)
    local entry = entry_of(run)
    if not entry and tenant ~= '' and not finished then
        entry = new_entry(tenant, job)
    end
    if entry then
        if changed or finished then
            for _, worker in ipairs(entry[SEATS]) do
                redis.call('ZADD', changes_of(worker), text(next_number('change')), run)
                keep(changes_of(worker), DAY)
            end
        end
        if finished then
            entry[FINISHED] = 1
        elseif delay < math.huge then
            -- A message for a run that had finished: it may have been resumed. Whoever takes it looks.
            entry[FINISHED] = 0
        end
        local idle = #entry[SEATS] == 0 and not redis.call('ZSCORE', due_of(entry[TENANT]), run)
        if delay < math.huge and (idle or not restored) then
            add_due(entry, now + math.floor(delay * 1000000))
            entry[PAUSE] = 0
        end
        store(run, entry)
    end
end
if ARGV[3] == '1' then
    redis.call('HSET', RUNS, '', '1')
end
keep_all()
return 1
