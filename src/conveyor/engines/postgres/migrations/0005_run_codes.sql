-- A run has a code for why it is in its state. Until now only the text of the job's reason said so.
ALTER TABLE runs ADD COLUMN reason_code text;
UPDATE runs SET reason_code = CASE
    WHEN j.reason LIKE 'ingest failed: %(tried % times)' THEN 'ingest_failed'
    WHEN j.reason LIKE 'ingest failed: The list has % not valid: %' THEN 'list_rejected'
    WHEN j.reason LIKE 'ingest failed: %' THEN 'list_unreadable'
    WHEN j.reason LIKE 'failure threshold: %' THEN 'failure_threshold'
    WHEN j.reason LIKE 'deadline: %' THEN 'deadline'
    WHEN j.reason = 'cancelled on request' THEN 'cancelled'
    WHEN j.reason = 'paused on request' THEN 'paused'
    WHEN j.state = 'failed' AND (j.reason LIKE '%there were no tasks' OR j.reason LIKE '%the list has no tasks (%')
        THEN 'no_tasks'
    WHEN j.reason LIKE 'closed: nothing was added for %' THEN 'idle_timeout'
END
FROM jobs AS j WHERE j.run_id = runs.run_id AND j.reason IS NOT NULL;

DROP VIEW jobs_shown;
DROP VIEW runs_shown;

-- A job with each of its runs.
CREATE VIEW runs_shown AS
SELECT j.tenant, j.job_id, j.name, j.kind, j.mode, j.options, j.task_shard_count, j.result_layout, j.state, j.reason,
    j.created_at, j.expires_at, j.source, j.version, r.run_id, r.number, r.state AS run_state, r.total, r.last_batch,
    r.created_at AS run_created_at, r.ended_at, r.sealed, r.invalid, r.touched_at, r.lineage, r.reason_code, r.swept,
    j.deleted, j.run_id AS latest
FROM jobs AS j JOIN runs AS r USING (job_id);

-- A job as it is read: with its latest run.
CREATE VIEW jobs_shown AS SELECT * FROM runs_shown WHERE run_id = latest;
