-- Retention counts from the end of the latest run. Until now it counted from the creation of the job, finished or not.
-- A job that has expired already may be half purged, and stays as it is.
UPDATE jobs SET expires_at = coalesce(
    r.ended_at + 86400 * coalesce((options::json ->> 'retention_days')::double precision, 14), 'infinity'
)
FROM runs AS r
WHERE r.run_id = jobs.run_id AND NOT jobs.deleted AND jobs.expires_at > extract(epoch FROM now());
