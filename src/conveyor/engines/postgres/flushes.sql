-- Each statement is about many runs. Locks are taken in the same order by all: ends, messages, counts, runs, jobs, and
-- last the turns of events; within each in order of the key.

-- name: run_numbers
SELECT run_id, tenant, run_no, own, rerun FROM task_runs WHERE run_id = ANY(:run_ids::text[]);

-- name: finish
WITH moved AS (
    INSERT INTO ends{own} (
        run_no, idx, shard, sort_key, status, attempts, http_status, error_code, detail, finished_at
    )
    SELECT e.run_no, e.idx, t.shard, t.sort_key, e.status, e.attempts, e.http_status, e.error_code, e.detail, e.at
    FROM unnest(
        :numbers::integer[], :indexes::bigint[], :statuses::smallint[], :attempts::integer[],
        :http_statuses::integer[], :error_codes::text[], :details::text[], :ats::double precision[]
    ) AS e (run_no, idx, status, attempts, http_status, error_code, detail, at)
    CROSS JOIN LATERAL (
        SELECT shard, sort_key FROM tasks{own} WHERE run_no = e.run_no AND idx = e.idx OFFSET 0
    ) AS t
    ON CONFLICT DO NOTHING
    RETURNING run_no, idx
)
SELECT run_no, idx FROM moved;

-- name: finished_so
SELECT e.run_no, e.idx FROM unnest(
    :numbers::integer[], :indexes::bigint[], :statuses::smallint[], :attempts::integer[], :ats::double precision[]
) AS e (run_no, idx, status, attempts, at)
WHERE EXISTS (
    SELECT FROM ends{own} AS t
    WHERE t.run_no = e.run_no AND t.idx = e.idx
        AND t.status = e.status AND t.attempts = e.attempts AND t.finished_at = e.at
    OFFSET 0
);

-- name: count
INSERT INTO task_counts AS c (
    run_no, slot, succeeded, failed, cancelled, unchanged,
    replaced_succeeded, replaced_failed, replaced_cancelled, replaced_unchanged
)
SELECT m.run_no, pg_backend_pid() % 16, m.succeeded, m.failed, m.cancelled, m.unchanged,
    m.replaced_succeeded, m.replaced_failed, m.replaced_cancelled, m.replaced_unchanged
FROM unnest(
    :numbers::integer[], :succeeded::bigint[], :failed::bigint[], :cancelled::bigint[], :unchanged::bigint[],
    :replaced_succeeded::bigint[], :replaced_failed::bigint[], :replaced_cancelled::bigint[],
    :replaced_unchanged::bigint[]
) AS m (
    run_no, succeeded, failed, cancelled, unchanged,
    replaced_succeeded, replaced_failed, replaced_cancelled, replaced_unchanged
)
ON CONFLICT (run_no, slot) DO UPDATE SET
    succeeded = c.succeeded + excluded.succeeded, failed = c.failed + excluded.failed,
    cancelled = c.cancelled + excluded.cancelled, unchanged = c.unchanged + excluded.unchanged,
    replaced_succeeded = c.replaced_succeeded + excluded.replaced_succeeded,
    replaced_failed = c.replaced_failed + excluded.replaced_failed,
    replaced_cancelled = c.replaced_cancelled + excluded.replaced_cancelled,
    replaced_unchanged = c.replaced_unchanged + excluded.replaced_unchanged;

-- name: count_errors
INSERT INTO task_errors AS c (run_no, error_code, slot, count, replaced)
SELECT e.run_no, e.code, pg_backend_pid() % 16, e.count, e.replaced
FROM unnest(:numbers::integer[], :codes::text[], :counts::bigint[], :replaced::bigint[])
    AS e (run_no, code, count, replaced)
ON CONFLICT (run_no, error_code, slot) DO UPDATE SET
    count = c.count + excluded.count, replaced = c.replaced + excluded.replaced;

-- name: counts
SELECT n.run_no, s.succeeded, s.failed, s.cancelled, s.unchanged FROM unnest(:numbers::integer[]) AS n (run_no)
CROSS JOIN LATERAL (
    SELECT coalesce(sum(succeeded), 0)::bigint AS succeeded, coalesce(sum(failed), 0)::bigint AS failed,
        coalesce(sum(cancelled), 0)::bigint AS cancelled, coalesce(sum(unchanged), 0)::bigint AS unchanged
    FROM task_counts WHERE run_no = n.run_no
) AS s;

-- name: send
INSERT INTO messages (queue, visible_at, body)
SELECT m.queue, m.visible_at, m.body
FROM unnest(:queues::text[], :times::double precision[], :bodies::bytea[]) AS m (queue, visible_at, body);

-- name: ack
WITH mine AS MATERIALIZED (
    SELECT m.id FROM unnest(:queues::text[], :ids::bigint[], :deliveries::text[]) AS r (queue, id, delivery)
    CROSS JOIN LATERAL (
        SELECT id FROM messages WHERE id = r.id AND delivery = r.delivery AND queue = r.queue FOR UPDATE
    ) AS m
)
DELETE FROM messages AS m USING mine WHERE m.id = mine.id;

-- name: complete_runs
WITH wanted AS MATERIALIZED (
    SELECT r.run_id, w.queue, w.recovery
    FROM unnest(:job_ids::text[], :run_ids::text[], :run_queues::text[], :recovery_queues::text[])
        AS w (job_id, run_id, queue, recovery)
    CROSS JOIN LATERAL (
        SELECT run_id FROM runs
        WHERE run_id = w.run_id AND job_id = w.job_id AND state = ANY(:sources::text[]) AND last_batch
            -- A job that has expired or was deleted may be half purged.
            AND EXISTS (SELECT FROM jobs AS j WHERE j.job_id = runs.job_id AND j.expires_at > :now)
        FOR NO KEY UPDATE
    ) AS r
)
-- One whose queues are empty leaves the sweeper nothing to clear. A worker that may still send to them has a message in
-- flight, which is there.
UPDATE runs SET state = 'completed', ended_at = :now,
    swept = NOT EXISTS (SELECT FROM messages AS m WHERE m.queue = wanted.queue OFFSET 0)
        AND NOT EXISTS (SELECT FROM messages AS m WHERE m.queue = wanted.recovery OFFSET 0)
FROM wanted WHERE runs.run_id = wanted.run_id
RETURNING runs.run_id;

-- name: complete_jobs
UPDATE jobs SET state = 'completed',
    expires_at = :now + 86400 * coalesce((options::json ->> 'retention_days')::double precision, :default_days)
FROM unnest(:job_ids::text[], :run_ids::text[]) AS w (job_id, run_id)
WHERE jobs.job_id = w.job_id AND jobs.run_id = w.run_id;

-- name: insert_events
WITH turns AS MATERIALIZED (
    SELECT e.*, pg_advisory_xact_lock(hashtextextended(current_schema() || ' outbox ' || e.job_id, 0)) FROM unnest(
        :event_ids::text[], :tenants::text[], :job_ids::text[], :run_ids::text[], :events::text[],
        :ats::double precision[], :datas::text[]
    ) AS e (event_id, tenant, job_id, run_id, event, at, data)
)
INSERT INTO outbox (event_id, tenant, job_id, run_id, event, at, data)
SELECT event_id, tenant, job_id, run_id, event, at, data FROM turns;

-- name: stored_events
SELECT run_id FROM outbox WHERE event_id = ANY(:event_ids::text[]);

-- name: note
-- Numbered in the order of their commits, like the events of the outbox.
WITH turns AS MATERIALIZED (
    SELECT pg_advisory_xact_lock(hashtextextended(current_schema() || ' events ' || n.run_no, 0))
    FROM unnest(:noted::integer[]) AS n (run_no)
)
INSERT INTO events{own} (run_no, idx, at, event, data)
SELECT e.* FROM (SELECT count(*) FROM turns) AS t, unnest(
    :numbers::integer[], :indexes::bigint[], :ats::double precision[], :events::text[], :datas::text[]
) AS e (run_no, idx, at, event, data)
WHERE NOT :again::boolean OR NOT EXISTS (
    SELECT FROM events{own} AS known
    WHERE known.run_no = e.run_no AND known.idx = e.idx AND known.at = e.at AND known.event = e.event
        AND known.data = e.data
    OFFSET 0
);
