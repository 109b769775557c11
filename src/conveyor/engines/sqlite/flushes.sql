-- What statements return for many runs is one row of JSON: each row more would hand over the interpreter lock once more.

-- name: run_numbers
SELECT json_group_array(json_array(run_id, tenant, run_no, rerun)) FROM task_runs
WHERE run_id IN (SELECT value FROM json_each(:run_ids));

-- name: unfinished
SELECT json_group_array(json_array(t.run_no, t.idx))
FROM (SELECT value ->> 0 AS run_no, value ->> 1 AS idx FROM json_each(:tasks)) AS wanted
CROSS JOIN tasks AS t ON t.run_no = wanted.run_no AND t.idx = wanted.idx
WHERE t.status = 0;

-- name: finish
-- Tasks that end alike, of any runs. The keys are decimal, 19 digits each: a run and an index.
WITH ends AS MATERIALIZED (
    SELECT CAST(substr(:keys, 38 * rowid - 37, 19) AS INTEGER) AS run_no,
        CAST(substr(:keys, 38 * rowid - 18, 19) AS INTEGER) AS idx, value AS detail
    FROM carray(:details)
)
UPDATE tasks
SET status = :status, attempts = :attempts, http_status = :http_status, error_code = :error_code,
    detail = ends.detail, finished_at = :at
FROM ends
WHERE tasks.run_no = ends.run_no AND tasks.idx = ends.idx AND tasks.status = 0;

-- name: finish_neighbours
-- Tasks of one run that end alike. One pass over their rows and those between them, without a table of ends, which the
-- statement above makes twice. Details are parts of one blob; of each index, the places have its part as 10 and 8
-- digits, or blanks.
UPDATE tasks
SET status = :status, attempts = :attempts, http_status = :http_status, error_code = :error_code,
    detail = CAST(substr(
        :details,
        CAST(substr(:places, 18 * (idx - :first) + 1, 10) AS INTEGER),
        CAST(substr(:places, 18 * (idx - :first) + 11, 8) AS INTEGER)
    ) AS TEXT),
    finished_at = :at
WHERE run_no = :run_no AND idx BETWEEN :first AND :last AND status = 0
    AND substr(:places, 18 * (idx - :first) + 1, 1) <> x'20';

-- name: count
WITH more AS MATERIALIZED (
    SELECT value ->> 0 AS run_no, value ->> 1 AS succeeded, value ->> 2 AS failed, value ->> 3 AS cancelled,
        value ->> 4 AS unchanged
    FROM json_each(:counts)
)
UPDATE task_runs
SET succeeded = task_runs.succeeded + more.succeeded, failed = task_runs.failed + more.failed,
    cancelled = task_runs.cancelled + more.cancelled, unchanged = task_runs.unchanged + more.unchanged
FROM more WHERE task_runs.run_no = more.run_no;

-- name: counts
SELECT json_group_array(json_array(run_no, succeeded, failed, cancelled, unchanged)) FROM task_runs
WHERE run_no IN (SELECT value ->> 0 FROM json_each(:counts));

-- name: count_errors
INSERT INTO task_errors (run_no, error_code, count)
SELECT value ->> 0, value ->> 1, value ->> 2 FROM json_each(:counts) WHERE TRUE
ON CONFLICT (run_no, error_code) DO UPDATE SET count = count + excluded.count;

-- name: note
INSERT INTO task_events (run_no, idx, at, event, data)
SELECT value ->> 0, value ->> '$[1][0]', value ->> '$[1][1]', value ->> '$[1][2]', value ->> '$[1][3]'
FROM jsonb_each(:events);

-- name: ack
DELETE FROM messages WHERE id IN (
    SELECT m.id
    FROM (SELECT value ->> 0 AS queue, value ->> 1 AS id, value ->> 2 AS delivery FROM json_each(:receipts)) AS r
    CROSS JOIN messages AS m ON m.id = r.id AND m.queue = r.queue AND m.delivery = r.delivery AND m.held = 1
);

-- name: completable_runs
SELECT json_group_array(run_id) FROM runs
WHERE run_id IN (SELECT value FROM json_each(:run_ids))
    AND state IN (SELECT value FROM json_each(:sources))
    AND last_batch = 1
    -- A job that has expired or was deleted may be half purged.
    AND EXISTS (SELECT 1 FROM jobs AS j WHERE j.job_id = runs.job_id AND j.expires_at > :now);

-- name: complete_runs
-- One whose queues are empty leaves the sweeper nothing to clear. A worker that may still send to them has a message in
-- flight, which is there.
WITH wanted AS MATERIALIZED (
    SELECT value ->> 0 AS run_id, value ->> 1 AS queue, value ->> 2 AS recovery FROM json_each(:runs)
)
UPDATE runs SET state = 'completed', ended_at = :now,
    swept = NOT EXISTS (SELECT 1 FROM messages WHERE queue IN (wanted.queue, wanted.recovery))
FROM wanted
WHERE runs.run_id = wanted.run_id;

-- name: complete_jobs
UPDATE jobs SET state = 'completed',
    expires_at = :now + 86400.0 * coalesce(options ->> '$.retention_days', :default_days)
WHERE job_id IN (SELECT value ->> 0 FROM json_each(:moved))
    AND run_id IN (SELECT value ->> 1 FROM json_each(:moved));
