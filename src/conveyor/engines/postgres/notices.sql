-- name: insert_notice
-- Those of one job are numbered in the order in which they are committed: a reader that has seen one has seen all
-- before it. Always the last step of a transaction, so that nobody waits for a row while holding this lock.
WITH turn AS MATERIALIZED (
    SELECT pg_advisory_xact_lock(hashtextextended(current_schema() || ' notices ' || :job_id, 0))
)
INSERT INTO notices (notice_id, tenant, job_id, run_id, event, at, data)
SELECT :notice_id, :tenant, :job_id::text, :run_id, :event, :at, :data FROM turn;

-- name: notice_there
SELECT 1 FROM notices WHERE notice_id = :notice_id;

-- name: notices
SELECT seq, at, event, run_id, NULL, data, notice_id FROM notices
WHERE tenant = :tenant AND job_id = :job_id AND seq > :after ORDER BY seq LIMIT :limit;

-- name: untold
SELECT notice_id, tenant, job_id, run_id, event, at, data FROM notices
WHERE NOT told ORDER BY seq LIMIT :limit;

-- name: mark_told
UPDATE notices SET told = true WHERE NOT told AND notice_id = ANY(:notice_ids::text[]);
