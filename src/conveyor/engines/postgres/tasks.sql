-- {own} is empty for the shared tables, and names those of one large run otherwise: see tables.py.
-- A lookup by indexes is fenced (OFFSET 0), so that it stays one: it is not to be turned round into a scan of the run.

-- name: run_no
SELECT run_no, own, rerun FROM task_runs WHERE run_id = :run_id AND tenant = :tenant;

-- name: run_numbers
SELECT run_id, tenant, run_no, own, rerun FROM task_runs WHERE run_id = ANY(:run_ids::text[]);

-- name: insert_run_no
INSERT INTO task_runs (run_id, tenant, rerun) VALUES (:run_id, :tenant, :rerun) ON CONFLICT DO NOTHING;

-- name: own_tables
-- As the shared ones, without the run's number in the keys. They are only written, read and dropped: a vacuum after
-- inserts would free nothing.
CREATE TABLE IF NOT EXISTS tasks{own} (LIKE tasks INCLUDING STORAGE, PRIMARY KEY (idx))
    WITH (autovacuum_vacuum_insert_threshold = -1);
CREATE INDEX IF NOT EXISTS tasks{own}_by_id ON tasks{own} (shard, sort_key, idx);
CREATE TABLE IF NOT EXISTS ends{own} (LIKE ends INCLUDING STORAGE, PRIMARY KEY (idx))
    WITH (autovacuum_vacuum_insert_threshold = -1);
CREATE INDEX IF NOT EXISTS ends{own}_failed ON ends{own} (shard, sort_key, idx) WHERE status = 2;
CREATE TABLE IF NOT EXISTS events{own} (LIKE events INCLUDING STORAGE INCLUDING DEFAULTS, PRIMARY KEY (seq))
    WITH (autovacuum_vacuum_insert_threshold = -1);
CREATE INDEX IF NOT EXISTS events{own}_by_task ON events{own} (idx, seq);

-- name: lock_own_tables
LOCK TABLE tasks{own}, ends{own}, events{own} IN ACCESS EXCLUSIVE MODE NOWAIT;

-- name: drop_own_tables
DROP TABLE tasks{own}, ends{own}, events{own};

-- name: put
INSERT INTO tasks{own} (run_no, idx, shard, sort_key, tag, input, prior)
SELECT :run_no::integer, s.* FROM unnest(
    :indexes::bigint[], :shards::smallint[], :sort_keys::bigint[], :tags::text[], :inputs::text[], :priors::text[]
) AS s
ON CONFLICT DO NOTHING;

-- name: unfinished
SELECT array_agg(wanted.idx) FROM unnest(:indexes::bigint[]) AS wanted (idx)
WHERE EXISTS (SELECT FROM tasks{own} WHERE run_no = :run_no AND idx = wanted.idx OFFSET 0)
    AND NOT EXISTS (SELECT FROM ends{own} WHERE run_no = :run_no AND idx = wanted.idx OFFSET 0);

-- name: unfinished_of_runs
SELECT w.run_no, array_agg(w.idx) FROM unnest(:numbers::integer[], :indexes::bigint[]) AS w (run_no, idx)
WHERE EXISTS (SELECT FROM tasks WHERE run_no = w.run_no AND idx = w.idx OFFSET 0)
    AND NOT EXISTS (SELECT FROM ends WHERE run_no = w.run_no AND idx = w.idx OFFSET 0)
GROUP BY w.run_no;

-- name: finish
WITH moved AS (
    INSERT INTO ends{own} (
        run_no, idx, shard, sort_key, status, attempts, http_status, error_code, detail, finished_at
    )
    SELECT :run_no::integer, e.idx, t.shard, t.sort_key, e.status, e.attempts, e.http_status, e.error_code, e.detail, e.at
    FROM unnest(
        :indexes::bigint[], :statuses::smallint[], :attempts::integer[], :http_statuses::integer[],
        :error_codes::text[], :details::text[], :ats::double precision[]
    ) AS e (idx, status, attempts, http_status, error_code, detail, at)
    CROSS JOIN LATERAL (
        SELECT shard, sort_key FROM tasks{own} WHERE run_no = :run_no AND idx = e.idx OFFSET 0
    ) AS t
    ON CONFLICT DO NOTHING
    RETURNING idx
)
SELECT array_agg(idx) FROM moved;

-- name: finished_so
SELECT array_agg(e.idx) FROM unnest(
    :indexes::bigint[], :statuses::smallint[], :attempts::integer[], :ats::double precision[]
) AS e (idx, status, attempts, at)
WHERE EXISTS (
    SELECT FROM ends{own} AS t
    WHERE t.run_no = :run_no AND t.idx = e.idx
        AND t.status = e.status AND t.attempts = e.attempts AND t.finished_at = e.at
    OFFSET 0
);

-- name: count
INSERT INTO task_counts AS c (
    run_no, slot, succeeded, failed, cancelled, unchanged,
    replaced_succeeded, replaced_failed, replaced_cancelled, replaced_unchanged
)
VALUES (
    :run_no, pg_backend_pid() % 16, :succeeded, :failed, :cancelled, :unchanged,
    :replaced_succeeded, :replaced_failed, :replaced_cancelled, :replaced_unchanged
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
SELECT :run_no::integer, e.code, pg_backend_pid() % 16, e.count, e.replaced
FROM unnest(:codes::text[], :counts::bigint[], :replaced::bigint[]) AS e (code, count, replaced)
ON CONFLICT (run_no, error_code, slot) DO UPDATE SET
    count = c.count + excluded.count, replaced = c.replaced + excluded.replaced;

-- name: priors
SELECT t.idx, t.prior FROM unnest(:indexes::bigint[]) AS wanted (idx)
CROSS JOIN LATERAL (
    SELECT idx, prior FROM tasks{own} WHERE run_no = :run_no AND idx = wanted.idx OFFSET 0
) AS t;

-- name: cancel_pending
WITH pending AS MATERIALIZED (
    SELECT t.idx, t.shard, t.sort_key FROM tasks{own} AS t
    WHERE t.run_no = :run_no AND t.idx >= :from
        AND NOT EXISTS (SELECT FROM ends{own} AS e WHERE e.run_no = :run_no AND e.idx = t.idx OFFSET 0)
    ORDER BY t.idx LIMIT :limit
), moved AS (
    INSERT INTO ends{own} (run_no, idx, shard, sort_key, status, attempts, finished_at)
    SELECT :run_no::integer, idx, shard, sort_key, 3, 0, :at::double precision FROM pending
    ON CONFLICT DO NOTHING
    RETURNING idx
)
SELECT (SELECT count(*) FROM moved), (SELECT max(idx) FROM pending);

-- name: counts
SELECT n.run_no, s.succeeded, s.failed, s.cancelled, s.unchanged FROM unnest(:numbers::integer[]) AS n (run_no)
CROSS JOIN LATERAL (
    SELECT coalesce(sum(succeeded), 0)::bigint AS succeeded, coalesce(sum(failed), 0)::bigint AS failed,
        coalesce(sum(cancelled), 0)::bigint AS cancelled, coalesce(sum(unchanged), 0)::bigint AS unchanged
    FROM task_counts WHERE run_no = n.run_no
) AS s;

-- name: replaced
SELECT coalesce(sum(replaced_succeeded), 0)::bigint, coalesce(sum(replaced_failed), 0)::bigint,
    coalesce(sum(replaced_cancelled), 0)::bigint, coalesce(sum(replaced_unchanged), 0)::bigint
FROM task_counts WHERE run_no = :run_no;

-- name: replaced_codes
SELECT error_code, sum(replaced)::bigint FROM task_errors WHERE run_no = :run_no
GROUP BY error_code HAVING sum(replaced) > 0 ORDER BY 2 DESC, 1 LIMIT :limit;

-- name: lock_counts
SELECT pg_advisory_xact_lock(hashtextextended(current_schema() || ' counts ' || :run_no::integer, 0));

-- name: recount
-- Rows and kept counts as of one moment: those who finish tasks change both at once, so that what they differ by is
-- what is wrong, whatever else is being written.
SELECT count(*) FILTER (WHERE e.status = 1), count(*) FILTER (WHERE e.status = 2),
    count(*) FILTER (WHERE e.status = 3), count(*) FILTER (WHERE e.status = 1 AND e.error_code = 'unchanged'),
    (SELECT coalesce(sum(succeeded), 0)::bigint FROM task_counts WHERE run_no = :run_no),
    (SELECT coalesce(sum(failed), 0)::bigint FROM task_counts WHERE run_no = :run_no),
    (SELECT coalesce(sum(cancelled), 0)::bigint FROM task_counts WHERE run_no = :run_no),
    (SELECT coalesce(sum(unchanged), 0)::bigint FROM task_counts WHERE run_no = :run_no)
FROM ({all_ends}) AS e;

-- name: ends_of
SELECT status, error_code FROM ends{own} WHERE run_no = :run_no

-- name: tally
SELECT (SELECT count(*) FROM tasks{own} WHERE run_no = :run_no) AS rows,
    (SELECT count(*) FROM ends{own} WHERE run_no = :run_no AND status = 1) AS succeeded,
    (SELECT count(*) FROM ends{own} WHERE run_no = :run_no AND status = 2) AS failed,
    (SELECT count(*) FROM ends{own} WHERE run_no = :run_no AND status = 3) AS cancelled,
    (SELECT count(*) FROM ends{own} WHERE run_no = :run_no AND status = 1 AND error_code = 'unchanged') AS unchanged,
    (SELECT count(*) FROM events{own} WHERE run_no = :run_no) AS events;

-- name: recount_replaced
SELECT count(*) FILTER (WHERE e.prior LIKE '1%'), count(*) FILTER (WHERE e.prior LIKE '2%'),
    count(*) FILTER (WHERE e.prior LIKE '3%'), count(*) FILTER (WHERE e.prior = '1unchanged'),
    (SELECT coalesce(sum(replaced_succeeded), 0)::bigint FROM task_counts WHERE run_no = :run_no),
    (SELECT coalesce(sum(replaced_failed), 0)::bigint FROM task_counts WHERE run_no = :run_no),
    (SELECT coalesce(sum(replaced_cancelled), 0)::bigint FROM task_counts WHERE run_no = :run_no),
    (SELECT coalesce(sum(replaced_unchanged), 0)::bigint FROM task_counts WHERE run_no = :run_no)
FROM ({all_ends}) AS e;

-- name: priors_of
SELECT t.prior FROM ends{own} AS e JOIN tasks{own} AS t ON t.run_no = e.run_no AND t.idx = e.idx
WHERE e.run_no = :run_no AND e.status IN (1, 2)

-- name: error_codes
SELECT error_code, sum(count)::bigint FROM task_errors WHERE run_no = :run_no
GROUP BY error_code HAVING sum(count) > 0 ORDER BY 2 DESC, 1 LIMIT :limit;

-- name: task
SELECT t.sort_key, t.idx, t.input, e.status, e.attempts, e.http_status, e.error_code, e.detail, e.finished_at
FROM tasks{own} AS t LEFT JOIN ends{own} AS e ON e.run_no = t.run_no AND e.idx = t.idx
WHERE t.run_no = :run_no AND t.shard = :shard AND t.sort_key = :sort_key

-- name: at
SELECT t.sort_key, t.idx, t.input, e.status, e.attempts, e.http_status, e.error_code, e.detail, e.finished_at
FROM unnest(:indexes::bigint[]) AS wanted (idx)
CROSS JOIN LATERAL (
    SELECT sort_key, idx, input FROM tasks{own} WHERE run_no = :run_no AND idx = wanted.idx OFFSET 0
) AS t
LEFT JOIN ends{own} AS e ON e.run_no = :run_no AND e.idx = t.idx
ORDER BY t.idx;

-- name: scan_end
SELECT sort_key, idx FROM tasks{own}
WHERE run_no = :run_no AND shard = :shard AND (sort_key, idx) > (:after_key, :after_idx)
ORDER BY sort_key, idx OFFSET :rows - 1 LIMIT 1;

-- name: scan_end_failed
SELECT sort_key, idx FROM ends{own}
WHERE run_no = :run_no AND shard = :shard AND status = 2 AND (sort_key, idx) > (:after_key, :after_idx)
ORDER BY sort_key, idx OFFSET :rows - 1 LIMIT 1;

-- name: page
SELECT t.sort_key, t.idx, t.input, e.status, e.attempts, e.http_status, e.error_code, e.detail, e.finished_at
FROM tasks{own} AS t LEFT JOIN ends{own} AS e ON e.run_no = t.run_no AND e.idx = t.idx
WHERE t.run_no = :run_no AND t.shard = :shard
    AND (t.sort_key, t.idx) > (:after_key, :after_idx) AND (t.sort_key, t.idx) <= (:last_key, :last_idx)
    AND (:status::smallint IS NULL OR coalesce(e.status, 0) = :status)
    AND (:error_code::text IS NULL OR e.error_code = :error_code)
    AND (:http_status::integer IS NULL OR e.http_status = :http_status)
    AND (:tag::text IS NULL OR t.tag = :tag)
ORDER BY t.sort_key, t.idx LIMIT :limit;

-- name: page_failed
SELECT e.sort_key, e.idx, t.input, e.status, e.attempts, e.http_status, e.error_code, e.detail, e.finished_at
FROM ends{own} AS e JOIN tasks{own} AS t ON t.run_no = e.run_no AND t.idx = e.idx
WHERE e.run_no = :run_no AND e.shard = :shard AND e.status = 2
    AND (e.sort_key, e.idx) > (:after_key, :after_idx) AND (e.sort_key, e.idx) <= (:last_key, :last_idx)
    AND (:error_code::text IS NULL OR e.error_code = :error_code)
    AND (:http_status::integer IS NULL OR e.http_status = :http_status)
    AND (:tag::text IS NULL OR t.tag = :tag)
ORDER BY e.sort_key, e.idx LIMIT :limit;

-- name: stretch
SELECT count(*), max(idx) FROM (
    SELECT idx FROM tasks{own} WHERE run_no = :run_no AND idx > :after ORDER BY idx LIMIT :limit
) AS stretch;

-- name: walk
SELECT t.sort_key, t.idx, t.input, e.status, e.attempts, e.http_status, e.error_code, e.detail, e.finished_at
FROM tasks{own} AS t LEFT JOIN ends{own} AS e ON e.run_no = t.run_no AND e.idx = t.idx
WHERE t.run_no = :run_no AND t.idx > :after AND t.idx <= :last
    AND (:status::smallint IS NULL OR coalesce(e.status, 0) = :status)
    AND (:error_code::text IS NULL OR e.error_code = :error_code)
    AND (:http_status::integer IS NULL OR e.http_status = :http_status)
    AND (:tag::text IS NULL OR t.tag = :tag)
ORDER BY t.idx;

-- name: next_failed
-- Over all failed tasks of the run, in the index alone: the fence keeps it from being a walk over all tasks.
SELECT idx FROM (SELECT idx FROM ends{own} WHERE run_no = :run_no AND status = 2 OFFSET 0) AS failed
WHERE idx > :after ORDER BY idx LIMIT :limit;

-- name: walk_failed
SELECT t.sort_key, t.idx, t.input, e.status, e.attempts, e.http_status, e.error_code, e.detail, e.finished_at
FROM tasks{own} AS t JOIN ends{own} AS e ON e.run_no = t.run_no AND e.idx = t.idx
WHERE t.run_no = :run_no AND t.idx = ANY(:indexes::bigint[])
    AND (:error_code::text IS NULL OR e.error_code = :error_code)
    AND (:http_status::integer IS NULL OR e.http_status = :http_status)
    AND (:tag::text IS NULL OR t.tag = :tag)
ORDER BY t.idx;

-- name: note
-- Numbered in the order of their commits, like the events of the outbox.
WITH turn AS MATERIALIZED (
    SELECT pg_advisory_xact_lock(hashtextextended(current_schema() || ' events ' || :run_no::integer, 0))
)
INSERT INTO events{own} (run_no, idx, at, event, data)
SELECT :run_no::integer, e.* FROM turn, unnest(
    :indexes::bigint[], :ats::double precision[], :events::text[], :datas::text[]
) AS e (idx, at, event, data);

-- name: note_again
WITH turn AS MATERIALIZED (
    SELECT pg_advisory_xact_lock(hashtextextended(current_schema() || ' events ' || :run_no::integer, 0))
)
INSERT INTO events{own} (run_no, idx, at, event, data)
SELECT :run_no::integer, e.* FROM turn, unnest(
    :indexes::bigint[], :ats::double precision[], :events::text[], :datas::text[]
) AS e (idx, at, event, data)
WHERE NOT EXISTS (
    SELECT FROM events{own} AS known
    WHERE known.run_no = :run_no AND known.idx = e.idx AND known.at = e.at AND known.event = e.event
        AND known.data = e.data
    OFFSET 0
);

-- name: events
SELECT seq, at, event, :run_id::text AS run_id, idx, data FROM events{own}
WHERE run_no = :run_no AND seq > :after ORDER BY seq LIMIT :limit

-- name: events_of_task
SELECT seq, at, event, :run_id::text AS run_id, idx, data FROM events{own}
WHERE run_no = :run_no AND idx = :idx AND seq > :after ORDER BY seq LIMIT :limit

-- name: delete_tasks
DELETE FROM tasks WHERE ctid = ANY(ARRAY(SELECT ctid FROM tasks WHERE run_no = :run_no LIMIT :limit));

-- name: delete_ends
DELETE FROM ends WHERE ctid = ANY(ARRAY(SELECT ctid FROM ends WHERE run_no = :run_no LIMIT :limit));

-- name: delete_events
DELETE FROM events WHERE ctid = ANY(ARRAY(SELECT ctid FROM events WHERE run_no = :run_no LIMIT :limit));

-- name: delete_counts
DELETE FROM task_counts WHERE run_no = :run_no;

-- name: delete_errors
DELETE FROM task_errors WHERE run_no = :run_no;

-- name: delete_run_no
DELETE FROM task_runs WHERE run_no = :run_no;

-- name: mark_own
UPDATE task_runs SET own = :own WHERE run_no = :run_no;

-- name: lock_own
SELECT pg_advisory_xact_lock(hashtextextended(current_schema() || ' tables ' || :run_no::integer, 0));
