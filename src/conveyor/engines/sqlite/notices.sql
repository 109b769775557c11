-- name: insert_notice
INSERT INTO notices (notice_id, tenant, job_id, run_id, event, at, data)
VALUES (:notice_id, :tenant, :job_id, :run_id, :event, :at, :data);

-- name: notices
SELECT seq, at, event, run_id, NULL, data, notice_id FROM notices
WHERE tenant = :tenant AND job_id = :job_id AND seq > :after ORDER BY seq LIMIT :limit;

-- name: untold
SELECT notice_id, tenant, job_id, run_id, event, at, data FROM notices
WHERE told = 0 ORDER BY seq LIMIT :limit;

-- name: mark_told
UPDATE notices SET told = 1 WHERE told = 0 AND notice_id IN (SELECT value FROM json_each(:notice_ids));
