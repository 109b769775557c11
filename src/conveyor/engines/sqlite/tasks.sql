-- name: run_no
SELECT run_no, rerun FROM task_runs WHERE run_id = :run_id AND tenant = :tenant;

-- name: insert_run_no
INSERT INTO task_runs (run_id, tenant, rerun) VALUES (:run_id, :tenant, :rerun) RETURNING run_no;

-- name: put
INSERT INTO tasks (run_no, idx, shard, sort_key, status, input, prior)
SELECT :run_no, value ->> 0, value ->> 1, value ->> 2, 0, value ->> 3, value ->> 4 FROM jsonb_each(:seeds) WHERE TRUE
ON CONFLICT (run_no, idx) DO NOTHING;

-- name: put_neighbours
-- The keys are decimal, 19 digits each.
INSERT INTO tasks (run_no, idx, shard, sort_key, status, input)
SELECT :run_no, :first + rowid - 1, 0, CAST(substr(:keys, 19 * rowid - 18, 19) AS INTEGER), 0, value
FROM carray(:inputs) WHERE TRUE
ON CONFLICT (run_no, idx) DO NOTHING;

-- name: unfinished
SELECT json_group_array(t.idx)
FROM (SELECT :run_no AS run_no, value AS idx FROM json_each(:indexes)) AS wanted
CROSS JOIN tasks AS t ON t.run_no = wanted.run_no AND t.idx = wanted.idx
WHERE t.status = 0;

-- name: unfinished_between
-- For neighbours: their rows, and those between them, one after the other.
SELECT json_group_array(idx) FROM tasks WHERE run_no = :run_no AND idx BETWEEN :first AND :last AND status = 0;

-- name: unfinished_of
-- The first look at a run: its number, too.
SELECT n.run_no, n.rerun, (
    SELECT json_group_array(t.idx) FROM json_each(:indexes) AS wanted
    CROSS JOIN tasks AS t ON t.run_no = n.run_no AND t.idx = wanted.value
    WHERE t.status = 0
)
FROM task_runs AS n WHERE n.run_id = :run_id AND n.tenant = :tenant;

-- name: finish
-- The run number stands in each row, so that the planner looks tasks up by ends and not the other way round.
WITH ends AS MATERIALIZED (
    SELECT :run_no AS run_no, value ->> 0 AS idx, value ->> 1 AS status, value ->> 2 AS attempts,
        value ->> 3 AS http_status, value ->> 4 AS error_code, value ->> 5 AS detail, value ->> 6 AS at
    FROM jsonb_each(:ends)
)
UPDATE tasks
SET status = ends.status, attempts = ends.attempts, http_status = ends.http_status,
    error_code = ends.error_code, detail = ends.detail, finished_at = ends.at
FROM ends
WHERE tasks.run_no = ends.run_no AND tasks.idx = ends.idx AND tasks.status = 0;

-- name: count
UPDATE task_runs
SET succeeded = succeeded + :succeeded, failed = failed + :failed, cancelled = cancelled + :cancelled,
    unchanged = unchanged + :unchanged
WHERE run_no = :run_no
RETURNING succeeded, failed, cancelled, unchanged;

-- name: count_errors
INSERT INTO task_errors (run_no, error_code, count)
SELECT :run_no, key, value FROM json_each(:counts) WHERE TRUE
ON CONFLICT (run_no, error_code) DO UPDATE SET count = count + excluded.count;

-- name: priors
SELECT idx, prior FROM tasks WHERE run_no = :run_no AND idx IN (SELECT value FROM json_each(:indexes));

-- name: count_replaced
UPDATE task_runs
SET replaced_succeeded = replaced_succeeded + :succeeded, replaced_failed = replaced_failed + :failed,
    replaced_cancelled = replaced_cancelled + :cancelled, replaced_unchanged = replaced_unchanged + :unchanged
WHERE run_no = :run_no;

-- name: count_replaced_errors
INSERT INTO task_errors (run_no, error_code, count, replaced)
SELECT :run_no, key, 0, value FROM json_each(:counts) WHERE TRUE
ON CONFLICT (run_no, error_code) DO UPDATE SET replaced = replaced + excluded.replaced;

-- name: pending
SELECT idx FROM tasks WHERE run_no = :run_no AND idx >= :start AND status = 0 ORDER BY idx LIMIT :limit;

-- name: cancel
UPDATE tasks SET status = 3, finished_at = :at
WHERE run_no = :run_no AND idx IN (SELECT value FROM json_each(:indexes)) AND status = 0;

-- name: counts
SELECT succeeded, failed, cancelled, unchanged FROM task_runs WHERE run_no = :run_no;

-- name: replaced
SELECT replaced_succeeded, replaced_failed, replaced_cancelled, replaced_unchanged FROM task_runs
WHERE run_no = :run_no;

-- name: replaced_codes
SELECT error_code, replaced FROM task_errors WHERE run_no = :run_no AND replaced > 0
ORDER BY replaced DESC, error_code LIMIT :limit;

-- name: recount
-- With the kept counts beside them: one statement sees one moment.
SELECT (
        SELECT json_array(
            succeeded, failed, cancelled, unchanged,
            replaced_succeeded, replaced_failed, replaced_cancelled, replaced_unchanged
        ) FROM task_runs WHERE run_no = :run_no
    ),
    count(*) FILTER (WHERE status = 1), count(*) FILTER (WHERE status = 2), count(*) FILTER (WHERE status = 3),
    count(*) FILTER (WHERE status = 1 AND error_code = 'unchanged'),
    count(*) FILTER (WHERE status IN (1, 2) AND prior LIKE '1%'),
    count(*) FILTER (WHERE status IN (1, 2) AND prior LIKE '2%'),
    count(*) FILTER (WHERE status IN (1, 2) AND prior LIKE '3%'),
    count(*) FILTER (WHERE status IN (1, 2) AND prior = '1unchanged')
FROM tasks WHERE run_no = :run_no;

-- name: set_counts
UPDATE task_runs SET succeeded = :c0, failed = :c1, cancelled = :c2, unchanged = :c3,
    replaced_succeeded = :c4, replaced_failed = :c5, replaced_cancelled = :c6, replaced_unchanged = :c7
WHERE run_no = :run_no;

-- name: error_codes
SELECT error_code, count FROM task_errors WHERE run_no = :run_no AND count > 0 ORDER BY count DESC, error_code LIMIT :limit;

-- name: at
SELECT t.idx, t.input, t.status, t.attempts, t.http_status, t.error_code, t.detail, t.finished_at
FROM (SELECT DISTINCT :run_no AS run_no, value AS idx FROM json_each(:indexes)) AS wanted
CROSS JOIN tasks AS t ON t.run_no = wanted.run_no AND t.idx = wanted.idx
ORDER BY t.idx;

-- name: scan_end_failed
SELECT sort_key, idx FROM tasks INDEXED BY tasks_failed
WHERE run_no = :run_no AND shard = :shard AND (sort_key, idx) > (:after_key, :after_idx) AND status = 2
ORDER BY sort_key, idx LIMIT 1 OFFSET :rows - 1;

-- name: page
-- Those of the given tasks that match, in the given order.
SELECT t.idx, t.input, t.status, t.attempts, t.http_status, t.error_code, t.detail, t.finished_at
FROM (SELECT :run_no AS run_no, key AS place, value AS idx FROM json_each(:indexes)) AS wanted
CROSS JOIN tasks AS t ON t.run_no = wanted.run_no AND t.idx = wanted.idx
WHERE (:status IS NULL OR status = :status)
    AND (:error_code IS NULL OR error_code = :error_code)
    AND (:http_status IS NULL OR http_status = :http_status)
    AND (:tag IS NULL OR iif(json_valid(input), json_extract(input, '$.tag'), NULL) = :tag)
ORDER BY wanted.place LIMIT :limit;

-- name: page_failed
SELECT idx, input, status, attempts, http_status, error_code, detail, finished_at FROM tasks
WHERE run_no = :run_no AND shard = :shard AND (sort_key, idx) > (:after_key, :after_idx) AND (sort_key, idx) <= (:last_key, :last_idx)
    AND status = 2
    AND (:error_code IS NULL OR error_code = :error_code)
    AND (:http_status IS NULL OR http_status = :http_status)
    AND (:tag IS NULL OR iif(json_valid(input), json_extract(input, '$.tag'), NULL) = :tag)
ORDER BY sort_key, idx LIMIT :limit;

-- name: walk_all
SELECT idx, input, status, attempts, http_status, error_code, detail, finished_at FROM tasks
WHERE run_no = :run_no AND idx > :after ORDER BY idx LIMIT :limit;

-- name: stretch
SELECT count(*), max(idx) FROM (
    SELECT idx FROM tasks WHERE run_no = :run_no AND idx > :after ORDER BY idx LIMIT :limit
);

-- name: walk
SELECT idx, input, status, attempts, http_status, error_code, detail, finished_at FROM tasks
WHERE run_no = :run_no AND idx > :after AND idx <= :last
    AND (:status IS NULL OR status = :status)
    AND (:error_code IS NULL OR error_code = :error_code)
    AND (:http_status IS NULL OR http_status = :http_status)
    AND (:tag IS NULL OR iif(json_valid(input), json_extract(input, '$.tag'), NULL) = :tag)
ORDER BY idx;

-- name: next_failed
-- Over all failed tasks of the run, in the index alone.
SELECT idx FROM tasks INDEXED BY tasks_failed
WHERE run_no = :run_no AND idx > :after AND status = 2 ORDER BY idx LIMIT :limit;

-- name: note
-- Not for a run that was deleted since its number was looked up: nobody would remove them.
INSERT INTO task_events (run_no, idx, at, event, data)
SELECT :run_no, value ->> 0, value ->> 1, value ->> 2, value ->> 3 FROM jsonb_each(:events)
WHERE EXISTS (SELECT 1 FROM task_runs WHERE run_no = :run_no);

-- name: events
SELECT seq, at, event, :run_id, idx, data FROM task_events
WHERE run_no = :run_no AND seq > :after ORDER BY seq LIMIT :limit;

-- name: events_of_task
SELECT seq, at, event, :run_id, idx, data FROM task_events
WHERE run_no = :run_no AND idx = :idx AND seq > :after ORDER BY seq LIMIT :limit;

-- name: delete_tasks
DELETE FROM tasks WHERE run_no = :run_no AND idx IN (SELECT idx FROM tasks WHERE run_no = :run_no LIMIT :limit);

-- name: delete_events
DELETE FROM task_events WHERE run_no = :run_no
    AND seq IN (SELECT seq FROM task_events WHERE run_no = :run_no LIMIT :limit);

-- name: delete_errors
DELETE FROM task_errors WHERE run_no = :run_no;

-- name: delete_run_no
DELETE FROM task_runs WHERE run_no = :run_no;
