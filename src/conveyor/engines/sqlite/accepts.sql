-- name: standing_claims
-- One row of JSON, as in flushes.sql.
SELECT json_group_array(json_array(i.tenant, i.route, i.key)) FROM jsonb_each(:claims) AS claim
CROSS JOIN idempotency AS i
    ON i.tenant = claim.value ->> 0 AND i.route = claim.value ->> 1 AND i.key = claim.value ->> 2
WHERE i.expires_at > :now;

-- name: answer_held
-- The claims were held in memory: there is no row yet, or an expired one.
INSERT INTO idempotency (tenant, route, key, fingerprint, subject, lease_until, expires_at, status, body)
SELECT value ->> 0, value ->> 1, value ->> 2, value ->> 3, value ->> 4, value ->> 5, value ->> 6, value ->> 7,
    unhex(value ->> 8)
FROM jsonb_each(:claims) WHERE TRUE
ON CONFLICT (tenant, route, key) DO UPDATE SET
    fingerprint = excluded.fingerprint, subject = excluded.subject, lease_until = excluded.lease_until,
    expires_at = excluded.expires_at, status = excluded.status, body = excluded.body
WHERE expires_at <= :now;

-- name: insert_jobs
-- JSON has no infinity: an unfinished job does not expire.
INSERT INTO jobs (
    job_id, tenant, name, kind, mode, options, task_shard_count, result_layout, state, reason, created_at, expires_at,
    run_id, source, source_key, version, task_store, bucket
)
SELECT value ->> 0, value ->> 1, value ->> 2, value ->> 3, value ->> 4, value ->> 5, value ->> 6, value ->> 7,
    value ->> 8, value ->> 9, value ->> 10, coalesce(value ->> 11, 9e999), value ->> 12, value ->> 13, value ->> 14,
    value ->> 15, value ->> 16, value ->> 17
FROM jsonb_each(:jobs);

-- name: insert_runs
INSERT INTO runs (
    run_id, job_id, number, state, total, last_batch, created_at, ended_at, sealed, invalid, touched_at, lineage,
    reason_code
)
SELECT value ->> 0, value ->> 1, value ->> 2, value ->> 3, value ->> 4, value ->> 5, value ->> 6, value ->> 7,
    value ->> 8, value ->> 9, value ->> 10, value ->> 11, value ->> 12
FROM jsonb_each(:runs);

-- name: number_runs
INSERT INTO task_runs (run_id, tenant)
SELECT value ->> 0, value ->> 1 FROM jsonb_each(:runs) WHERE TRUE
ON CONFLICT (run_id, tenant) DO NOTHING;

-- name: insert_tasks
INSERT INTO tasks (run_no, idx, shard, sort_key, status, input, prior)
SELECT n.run_no, seed.value ->> 0, seed.value ->> 1, seed.value ->> 2, 0, seed.value ->> 3, seed.value ->> 4
FROM jsonb_each(:runs) AS run
CROSS JOIN task_runs AS n ON n.run_id = run.value ->> 0 AND n.tenant = run.value ->> 1
CROSS JOIN jsonb_each(run.value, '$[2]') AS seed
WHERE TRUE
ON CONFLICT (run_no, idx) DO NOTHING;
