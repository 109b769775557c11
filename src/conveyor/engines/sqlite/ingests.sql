-- name: seal_run
UPDATE runs SET sealed = 1, reason_code = coalesce(:reason_code, reason_code)
WHERE job_id = :job_id AND run_id = :run_id AND sealed = 0 AND ended_at IS NULL
    AND touched_at = coalesce(:touched_at, touched_at);

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
SELECT ranges, ranges_done, range_tasks, range_invalid, bytes_read, bytes_known, ranges_endless FROM runs
WHERE run_id = :run_id;

-- name: checkpoint
UPDATE ranges SET next_index = :index, byte_offset = :offset, tasks = :tasks, invalid = :invalid, done = :done,
    fence = :fence
WHERE run_id = :run_id AND number = :number AND fence <= :fence
    AND EXISTS (SELECT 1 FROM runs WHERE run_id = :run_id AND ended_at IS NULL);

-- name: add_sums
-- The run shows what all its ranges have together, until it is latched.
UPDATE runs SET ranges = ranges + :ranges, ranges_done = ranges_done + :ranges_done,
    range_tasks = range_tasks + :range_tasks, range_invalid = range_invalid + :range_invalid,
    bytes_read = bytes_read + :bytes_read, bytes_known = bytes_known + :bytes_known,
    ranges_endless = ranges_endless + :ranges_endless,
    total = iif(last_batch, total, range_tasks + :range_tasks),
    invalid = iif(last_batch, invalid, range_invalid + :range_invalid)
WHERE run_id = :run_id;
