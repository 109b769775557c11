-- name: insert_job
INSERT INTO jobs (
    job_id, tenant, name, kind, mode, options, task_shard_count, result_layout, state, reason, created_at, expires_at,
    run_id, source, source_key, version, task_store, bucket
) VALUES (
    :job_id, :tenant, :name, :kind, :mode, :options, :task_shard_count, :result_layout, :state, :reason, :created_at,
    :expires_at, :run_id, :source, :source_key, :version, :task_store,
    :bucket
);

-- name: insert_run
INSERT INTO runs (
    run_id, job_id, number, state, total, last_batch, created_at, ended_at, sealed, invalid, touched_at, lineage,
    reason_code
) VALUES (
    :run_id, :job_id, :number, :state, :total, :last_batch, :created_at, :ended_at, :sealed, :invalid, :created_at,
    :lineage, :reason_code
);

-- name: show_new_run
UPDATE jobs SET run_id = :run_id, state = :state, reason = :reason, options = :options, version = version + 1,
    expires_at = 9e999
WHERE job_id = :job_id AND tenant = :tenant AND expires_at > :now AND deleted = 0
    AND task_store IN ('', :task_store)
    AND EXISTS (
        SELECT 1 FROM runs AS r
        WHERE r.run_id = jobs.run_id AND r.ended_at IS NOT NULL AND r.number = :number - 1
    );

-- name: change_options
-- The time of an unfinished job is infinite, and stays so.
UPDATE jobs SET options = :options, version = version + 1,
    expires_at = expires_at + 86400.0 * (:retention_days - coalesce(options ->> '$.retention_days', :default_days))
WHERE job_id = :job_id AND version = :version AND expires_at > :now AND deleted = 0;

-- name: keep_job
-- The time of an unfinished job is infinite, and stays so.
UPDATE jobs SET expires_at = max(expires_at, :until)
WHERE tenant = :tenant AND job_id = :job_id AND expires_at > :now AND deleted = 0;

-- name: job
SELECT * FROM jobs_shown
WHERE tenant = :tenant AND job_id = :job_id AND expires_at > :now AND deleted = 0;

-- name: jobs_of
SELECT * FROM jobs_shown
WHERE job_id IN (SELECT value FROM json_each(:job_ids)) AND expires_at > :now AND deleted = 0;

-- name: jobs
SELECT * FROM jobs_shown
WHERE tenant = :tenant AND job_id < :before AND expires_at > :now AND deleted = 0
ORDER BY job_id DESC LIMIT :limit;

-- name: active_jobs
SELECT * FROM jobs_shown
WHERE state IN ('ingesting', 'running', 'paused')
ORDER BY job_id;

-- name: active_jobs_of_buckets
-- A job that an earlier version wrote has no bucket: the caller computes it.
SELECT * FROM jobs_shown
WHERE state IN ('ingesting', 'running', 'paused') AND job_id IN (
    SELECT job_id FROM jobs
    WHERE state IN ('ingesting', 'running', 'paused') AND (bucket IS NULL OR bucket IN (SELECT value FROM json_each(:buckets)))
)
ORDER BY job_id;

-- name: unswept_jobs
-- All runs, not only the latest: a run that finished just before the next one was added is not swept yet either.
SELECT * FROM runs_shown
WHERE ended_at IS NOT NULL AND swept = 0 ORDER BY ended_at LIMIT :limit;

-- name: purgeable_jobs
SELECT * FROM jobs_shown
WHERE expires_at <= :before ORDER BY expires_at LIMIT :limit;

-- name: finished_jobs
SELECT * FROM jobs_shown AS j
WHERE job_id > :after AND task_store <> :outside AND ended_at IS NOT NULL AND expires_at > :now AND deleted = 0
    AND NOT EXISTS (SELECT 1 FROM runs AS r WHERE r.job_id = j.job_id AND (r.ended_at IS NULL OR r.swept = 0))
ORDER BY job_id LIMIT :limit;

-- name: record_task_store
UPDATE jobs SET task_store = :task_store WHERE job_id = :job_id AND task_store = '';

-- name: switch_task_store
UPDATE jobs SET task_store = :target
WHERE job_id = :job_id AND run_id = :run_id AND task_store = :source
    AND NOT EXISTS (SELECT 1 FROM runs AS r WHERE r.job_id = jobs.job_id AND (r.ended_at IS NULL OR r.swept = 0));

-- name: is_in_task_store
SELECT 1 FROM jobs WHERE job_id = :job_id AND run_id = :run_id AND task_store = :target;

-- name: mark_swept
UPDATE runs SET swept = 1 FROM (SELECT value ->> 0 AS job_id, value ->> 1 AS run_id FROM json_each(:runs)) AS done
WHERE runs.run_id = done.run_id AND runs.job_id = done.job_id AND runs.ended_at IS NOT NULL;

-- name: run
SELECT run_id, number, state, total, last_batch, created_at, ended_at, sealed, invalid, touched_at, lineage,
    reason_code
FROM runs
WHERE job_id = :job_id AND run_id = :run_id;

-- name: runs
SELECT run_id, number, state, total, last_batch, created_at, ended_at, sealed, invalid, touched_at, lineage,
    reason_code
FROM runs
WHERE job_id = :job_id ORDER BY number;

-- name: set_total
UPDATE runs SET total = :total, invalid = :invalid
WHERE job_id = :job_id AND run_id = :run_id AND last_batch = 0;

-- name: latch
UPDATE runs SET last_batch = 1, state = iif(state = 'ingesting', 'running', state)
WHERE job_id = :job_id AND run_id = :run_id AND last_batch = 0;

-- name: show_run_state
UPDATE jobs SET state = (SELECT state FROM runs WHERE run_id = :run_id)
WHERE job_id = :job_id AND run_id = :run_id;

-- name: move_run
UPDATE runs SET state = :target, ended_at = :ended_at, swept = :keep,
    reason_code = iif(:target = 'completed', coalesce(:reason_code, reason_code), :reason_code)
WHERE job_id = :job_id AND run_id = :run_id
    AND state IN (SELECT value FROM json_each(:sources))
    AND (:target <> 'completed' OR last_batch = 1)
    AND (:target <> 'ingesting' OR last_batch = 0)
    -- A job that has expired or was deleted may be half purged.
    AND EXISTS (SELECT 1 FROM jobs AS j WHERE j.job_id = runs.job_id AND j.expires_at > :now);

-- name: move_job
UPDATE jobs SET state = :target, reason = iif(:target = 'completed', coalesce(:reason, reason), :reason),
    expires_at = coalesce(:ended_at + 86400.0 * coalesce(options ->> '$.retention_days', :default_days), 9e999)
WHERE job_id = :job_id AND run_id = :run_id;

-- name: mark_deleted
UPDATE jobs SET deleted = 1, expires_at = :now,
    state = iif(state IN ('ingesting', 'running', 'paused'), 'cancelled', state)
WHERE tenant = :tenant AND job_id = :job_id AND expires_at > :now AND deleted = 0;

-- name: end_runs
UPDATE runs SET state = 'cancelled', ended_at = :now, swept = 1 WHERE job_id = :job_id AND ended_at IS NULL;

-- name: purge_ranges
DELETE FROM ranges WHERE run_id IN (SELECT run_id FROM runs WHERE job_id = :job_id);

-- name: purge_events
DELETE FROM outbox WHERE tenant = :tenant AND job_id = :job_id;

-- name: purge_documents
DELETE FROM documents WHERE job_id = :job_id;

-- name: purge_runs
DELETE FROM runs WHERE job_id = :job_id;

-- name: purge_job
DELETE FROM jobs WHERE job_id = :job_id AND expires_at <= :now RETURNING tenant, source_key;
