-- A job records which task engine holds its rows. Jobs from before have no record: the configured engine holds them.
ALTER TABLE jobs ADD COLUMN task_store TEXT NOT NULL DEFAULT '';

DROP VIEW jobs_shown;
DROP VIEW runs_shown;

-- A job with each of its runs.
CREATE VIEW runs_shown AS
SELECT j.tenant, j.job_id, j.name, j.kind, j.mode, j.options, j.task_shard_count, j.result_layout, j.state, j.reason,
    j.created_at, j.expires_at, j.source, j.version, r.run_id, r.number, r.state AS run_state, r.total, r.last_batch,
    r.created_at AS run_created_at, r.ended_at, r.sealed, r.invalid, r.touched_at, r.lineage, r.reason_code, r.swept,
    j.deleted, j.run_id AS latest, j.task_store
FROM jobs AS j JOIN runs AS r USING (job_id);

-- A job as it is read: with its latest run.
CREATE VIEW jobs_shown AS SELECT * FROM runs_shown WHERE run_id = latest;
