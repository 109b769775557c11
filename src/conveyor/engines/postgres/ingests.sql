-- name: seal_run
UPDATE runs SET sealed = true WHERE job_id = :job_id AND run_id = :run_id AND NOT sealed AND ended_at IS NULL;

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
-- The end of a compressed list is not known before it is reached.
SELECT count(*), count(*) FILTER (WHERE done), coalesce(sum(tasks), 0)::bigint, coalesce(sum(invalid), 0)::bigint,
    coalesce(sum(least(byte_offset, coalesce(stop, byte_offset)) - first_byte), 0)::bigint,
    CASE WHEN count(stop) = count(*) THEN coalesce(sum(stop - first_byte), 0)::bigint END
FROM (
    SELECT done, tasks, invalid, byte_offset, first_byte,
        coalesce(end_byte, CASE WHEN done THEN byte_offset END) AS stop
    FROM ranges WHERE run_id = :run_id
) AS each;

-- name: lock_run
SELECT 1 FROM runs WHERE run_id = :run_id AND ended_at IS NULL FOR NO KEY UPDATE;

-- name: checkpoint
UPDATE ranges SET next_index = :index, byte_offset = :offset, tasks = :tasks, invalid = :invalid, done = :done,
    fence = :fence
WHERE run_id = :run_id AND number = :number AND fence <= :fence;

-- name: show_progress
UPDATE runs SET
    total = (SELECT sum(tasks) FROM ranges WHERE run_id = :run_id),
    invalid = (SELECT sum(invalid) FROM ranges WHERE run_id = :run_id)
WHERE run_id = :run_id AND NOT last_batch;
