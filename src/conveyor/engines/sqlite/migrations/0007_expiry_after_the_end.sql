-- Retention counts from the end of the latest run. Until now it counted from the creation of the job, finished or not.
-- A job that has expired already may be half purged, and stays as it is.
UPDATE jobs SET expires_at = coalesce(
    (SELECT r.ended_at FROM runs AS r WHERE r.run_id = jobs.run_id)
        + 86400.0 * coalesce(options ->> '$.retention_days', 14.0),
    9e999
)
WHERE deleted = 0 AND expires_at > unixepoch();
