-- When autovacuum comes, and room for updates in place. These need no lock that readers or writers wait for.

-- Few rows, updated all the time: vacuum by number, at full speed.
ALTER TABLE messages SET (autovacuum_vacuum_threshold = 500);
ALTER TABLE task_counts SET (
    autovacuum_vacuum_scale_factor = 0.0, autovacuum_vacuum_threshold = 500, autovacuum_vacuum_cost_delay = 0
);
ALTER TABLE task_errors SET (
    autovacuum_vacuum_scale_factor = 0.0, autovacuum_vacuum_threshold = 500, autovacuum_vacuum_cost_delay = 0
);

-- A row lives for days and is updated in its first minutes: with the default, a fifth of the table may be dead.
ALTER TABLE jobs SET (autovacuum_vacuum_scale_factor = 0.02, autovacuum_vacuum_threshold = 500);
ALTER TABLE runs SET (autovacuum_vacuum_scale_factor = 0.02, autovacuum_vacuum_threshold = 500);
ALTER TABLE ranges SET (autovacuum_vacuum_scale_factor = 0.02, autovacuum_vacuum_threshold = 500);
ALTER TABLE outbox SET (autovacuum_vacuum_scale_factor = 0.02, autovacuum_vacuum_threshold = 500);
ALTER TABLE idempotency SET (
    fillfactor = 80, autovacuum_vacuum_scale_factor = 0.02, autovacuum_vacuum_threshold = 500
);
ALTER TABLE documents SET (
    fillfactor = 80, autovacuum_vacuum_scale_factor = 0.02, autovacuum_vacuum_threshold = 500
);

-- Large, never updated, and purged run by run. Ten times the default speed, or a vacuum of a large table takes days.
ALTER TABLE tasks SET (
    autovacuum_vacuum_scale_factor = 0.02, autovacuum_vacuum_threshold = 5000, autovacuum_vacuum_cost_limit = 2000
);
ALTER TABLE ends SET (
    autovacuum_vacuum_scale_factor = 0.02, autovacuum_vacuum_threshold = 5000, autovacuum_vacuum_cost_limit = 2000
);
ALTER TABLE events SET (
    autovacuum_vacuum_scale_factor = 0.02, autovacuum_vacuum_threshold = 5000, autovacuum_vacuum_cost_limit = 2000
);

-- The tables of a large run are only written, read and dropped: a vacuum of them frees nothing.
DO $$
DECLARE
    number integer;
    kind text;
BEGIN
    FOR number IN SELECT run_no FROM task_runs WHERE own LOOP
        FOREACH kind IN ARRAY ARRAY['tasks', 'ends', 'events'] LOOP
            EXECUTE format(
                'ALTER TABLE IF EXISTS %I SET (autovacuum_vacuum_insert_threshold = -1)', kind || '_' || number
            );
        END LOOP;
    END LOOP;
END
$$;
