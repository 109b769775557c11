-- name: insert_job
INSERT INTO jobs VALUES (
    :job_id, :tenant, :name, :kind, :mode, :options, :task_shard_count, :result_layout,
    :state, :reason, :created_at, :expires_at, :run_id, :source
);

-- name: insert_run
INSERT INTO runs (run_id, job_id, number, state, total, last_batch, created_at, ended_at)
VALUES (:run_id, :job_id, :number, :state, :total, :last_batch, :created_at, :ended_at);

-- name: insert_notice
INSERT INTO notices (notice_id, tenant, job_id, run_id, event, at, data)
VALUES (:notice_id, :tenant, :job_id, :run_id, :event, :at, :data);

-- name: insert_idempotency
INSERT OR REPLACE INTO idempotency VALUES (:tenant, :route, :key, :fingerprint, :status, :body, :expires_at);

-- name: idempotency
SELECT tenant, route, key, fingerprint, status, body, expires_at FROM idempotency
WHERE tenant = :tenant AND route = :route AND key = :key AND expires_at > :now;

-- name: job
SELECT j.tenant, j.job_id, j.name, j.kind, j.mode, j.options, j.task_shard_count, j.result_layout, j.state,
    j.reason, j.created_at, j.expires_at, r.run_id, r.number, r.state, r.total, r.last_batch, r.created_at, r.ended_at, j.source
FROM jobs AS j JOIN runs AS r USING (run_id)
WHERE j.tenant = :tenant AND j.job_id = :job_id AND j.expires_at > :now;

-- name: jobs
SELECT j.tenant, j.job_id, j.name, j.kind, j.mode, j.options, j.task_shard_count, j.result_layout, j.state,
    j.reason, j.created_at, j.expires_at, r.run_id, r.number, r.state, r.total, r.last_batch, r.created_at, r.ended_at, j.source
FROM jobs AS j JOIN runs AS r USING (run_id)
WHERE j.tenant = :tenant AND j.job_id < :before AND j.expires_at > :now
ORDER BY j.job_id DESC LIMIT :limit;

-- name: active_jobs
SELECT j.tenant, j.job_id, j.name, j.kind, j.mode, j.options, j.task_shard_count, j.result_layout, j.state,
    j.reason, j.created_at, j.expires_at, r.run_id, r.number, r.state, r.total, r.last_batch, r.created_at, r.ended_at, j.source
FROM jobs AS j JOIN runs AS r USING (run_id)
WHERE j.state IN ('ingesting', 'running', 'paused') AND j.expires_at > :now
ORDER BY j.job_id;

-- name: ended_unswept
SELECT j.tenant, j.job_id, j.name, j.kind, j.mode, j.options, j.task_shard_count, j.result_layout, j.state,
    j.reason, j.created_at, j.expires_at, r.run_id, r.number, r.state, r.total, r.last_batch, r.created_at, r.ended_at, j.source
FROM runs AS r JOIN jobs AS j USING (run_id)
WHERE r.ended_at IS NOT NULL AND r.swept = 0 ORDER BY r.ended_at LIMIT :limit;

-- name: mark_swept
UPDATE runs SET swept = 1 WHERE job_id = :job_id AND run_id = :run_id AND ended_at IS NOT NULL;

-- name: run
SELECT run_id, number, state, total, last_batch, created_at, ended_at FROM runs
WHERE job_id = :job_id AND run_id = :run_id;

-- name: set_total
UPDATE runs SET total = :total WHERE job_id = :job_id AND run_id = :run_id AND last_batch = 0;

-- name: latch
UPDATE runs SET last_batch = 1, state = iif(state = 'ingesting', 'running', state)
WHERE job_id = :job_id AND run_id = :run_id;

-- name: show_run_state
UPDATE jobs SET state = (SELECT state FROM runs WHERE run_id = :run_id)
WHERE job_id = :job_id AND run_id = :run_id;

-- name: checkpoint
INSERT INTO ingests (run_id, next_index, byte_offset, fence)
SELECT :run_id, :next_index, :offset, :fence FROM runs
WHERE run_id = :run_id AND job_id = :job_id AND last_batch = 0 AND ended_at IS NULL
ON CONFLICT (run_id) DO UPDATE SET next_index = :next_index, byte_offset = :offset, fence = :fence
WHERE fence <= :fence;

-- name: show_progress
UPDATE runs SET total = :next_index WHERE run_id = :run_id AND last_batch = 0;

-- name: checkpointed
SELECT next_index, byte_offset FROM ingests WHERE run_id = :run_id;

-- name: move_run
UPDATE runs SET state = :target, ended_at = :ended_at
WHERE job_id = :job_id AND run_id = :run_id
    AND state IN (SELECT value FROM json_each(:sources))
    AND (:target <> 'completed' OR last_batch = 1);

-- name: move_job
UPDATE jobs SET state = :target, reason = :reason WHERE job_id = :job_id AND run_id = :run_id;

-- name: notices
SELECT seq, at, event, run_id, NULL, data FROM notices
WHERE tenant = :tenant AND job_id = :job_id AND seq > :after ORDER BY seq LIMIT :limit;

-- name: insert_key
INSERT INTO keys VALUES (:key_id, :tenant, :name, :secret_sha256, :created_at, :revoked_at, :expires_at);

-- name: key
SELECT key_id, tenant, name, secret_sha256, created_at, revoked_at, expires_at FROM keys WHERE key_id = :key_id;

-- name: keys
SELECT key_id, tenant, name, secret_sha256, created_at, revoked_at, expires_at FROM keys
WHERE :tenant IS NULL OR tenant = :tenant ORDER BY created_at, key_id;

-- name: revoke_key
UPDATE keys SET revoked_at = :at WHERE key_id = :key_id AND revoked_at IS NULL;
