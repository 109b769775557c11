-- name: seal_run
UPDATE runs SET sealed = true, reason_code = coalesce(:reason_code, reason_code)
WHERE job_id = :job_id AND run_id = :run_id AND NOT sealed AND ended_at IS NULL
    AND touched_at = coalesce(:touched_at::double precision, touched_at);

-- name: sealed_so
SELECT 1 FROM runs AS r JOIN jobs AS j USING (run_id)
WHERE j.job_id = :job_id AND r.run_id = :run_id AND r.sealed AND j.reason IS NOT DISTINCT FROM coalesce(:reason, j.reason);

-- name: seal_job
UPDATE jobs SET reason = coalesce(:reason, reason) WHERE job_id = :job_id AND run_id = :run_id;

-- name: insert_ranges
INSERT INTO ranges (run_id, number, plan, first_byte, end_byte, next_index, byte_offset)
SELECT :run_id, r.* FROM unnest(
    :numbers::integer[], :plans::text[], :firsts::bigint[], :ends::bigint[], :indexes::bigint[], :offsets::bigint[]
) AS r;

-- name: lock_open_run
-- First, so that what the next statement reads has all that those who held it before have written.
SELECT 1 FROM runs WHERE job_id = :job_id AND run_id = :run_id AND NOT sealed AND ended_at IS NULL
FOR NO KEY UPDATE;

-- name: allocate
UPDATE runs SET next_index = next_index + :lines::bigint, touched_at = :now, sealed = :seal
WHERE job_id = :job_id AND run_id = :run_id
RETURNING next_index - :lines::bigint;

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

-- name: lock_run
SELECT 1 FROM runs WHERE run_id = :run_id AND ended_at IS NULL FOR NO KEY UPDATE;

-- name: checkpoint
UPDATE ranges SET next_index = :index, byte_offset = :offset, tasks = :tasks, invalid = :invalid, done = :done,
    fence = :fence
WHERE run_id = :run_id AND number = :number AND fence <= :fence;

-- name: add_sums
-- The run shows what all its ranges have together, until it is latched.
UPDATE runs SET ranges = ranges + :ranges::bigint, ranges_done = ranges_done + :ranges_done::bigint,
    range_tasks = range_tasks + :range_tasks::bigint, range_invalid = range_invalid + :range_invalid::bigint,
    bytes_read = bytes_read + :bytes_read::bigint, bytes_known = bytes_known + :bytes_known::bigint,
    ranges_endless = ranges_endless + :ranges_endless::bigint,
    total = CASE WHEN last_batch THEN total ELSE range_tasks + :range_tasks::bigint END,
    invalid = CASE WHEN last_batch THEN invalid ELSE range_invalid + :range_invalid::bigint END
WHERE run_id = :run_id;
