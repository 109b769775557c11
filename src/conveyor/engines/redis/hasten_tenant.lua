-- ARGV: the tenant.
for _, run in ipairs(redis.call('ZRANGEBYSCORE', due_of(ARGV[2]), '(' .. text(now), '+inf')) do
    local entry = entry_of(run)
    if entry then
        add_due(entry, now)
        store(run, entry)
    end
end
return 1
