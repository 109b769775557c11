-- name: seal_run
UPDATE runs SET sealed = 1 WHERE job_id = :job_id AND run_id = :run_id AND sealed = 0 AND ended_at IS NULL;

-- name: seal_job
UPDATE jobs SET reason = coalesce(:reason, reason) WHERE job_id = :job_id AND run_id = :run_id;

-- name: insert_range
INSERT INTO ranges (run_id, number, plan, next_index, byte_offset)
VALUES (:run_id, :number, :plan, :index, :offset);

-- name: takes_more
SELECT 1 FROM runs WHERE job_id = :job_id AND run_id = :run_id AND sealed = 0 AND ended_at IS NULL;

-- name: allocate
UPDATE runs SET next_index = next_index + :lines, touched_at = :now, sealed = :seal
WHERE job_id = :job_id AND run_id = :run_id AND sealed = 0 AND ended_at IS NULL
RETURNING next_index - :lines;

-- name: next_number
SELECT coalesce(max(number) + 1, 0) FROM ranges WHERE run_id = :run_id;

-- name: ranges
SELECT number, plan, next_index, byte_offset, tasks, invalid, done FROM ranges
WHERE run_id = :run_id ORDER BY number;

-- name: range
SELECT number, plan, next_index, byte_offset, tasks, invalid, done FROM ranges
WHERE run_id = :run_id AND number = :number;

-- name: ingested
-- The end of a compressed list is not known before it is reached.
SELECT count(*), coalesce(sum(done), 0), coalesce(sum(tasks), 0), coalesce(sum(invalid), 0),
    coalesce(sum(min(byte_offset, coalesce(stop, byte_offset)) - start), 0),
    iif(count(stop) = count(*), coalesce(sum(stop - start), 0), NULL)
FROM (
    SELECT done, tasks, invalid, byte_offset, plan ->> '$.start' AS start, coalesce(
        plan ->> '$.end', iif(plan ->> '$.compression' = 'none', plan ->> '$.source.size', iif(done, byte_offset, NULL))
    ) AS stop
    FROM ranges WHERE run_id = :run_id
);

-- name: checkpoint
UPDATE ranges SET next_index = :index, byte_offset = :offset, tasks = :tasks, invalid = :invalid, done = :done,
    fence = :fence
WHERE run_id = :run_id AND number = :number AND fence <= :fence
    AND EXISTS (SELECT 1 FROM runs WHERE run_id = :run_id AND ended_at IS NULL);

-- name: show_progress
UPDATE runs SET
    total = (SELECT sum(tasks) FROM ranges WHERE run_id = :run_id),
    invalid = (SELECT sum(invalid) FROM ranges WHERE run_id = :run_id)
WHERE run_id = :run_id AND last_batch = 0;
