-- name: accept
-- All of a small job in one statement, and so in one round trip. If the claim was lost, it writes nothing.
WITH answered AS (
    UPDATE idempotency SET status = :status, body = :body, expires_at = :claim_expires_at
    WHERE :is_claimed AND tenant = :tenant AND route = :route AND key = :key AND status = 0
        AND subject = :subject AND fingerprint = :fingerprint
    RETURNING 1
), granted AS MATERIALIZED (
    SELECT 1 AS granted WHERE NOT :is_claimed::boolean OR EXISTS (SELECT FROM answered)
), job AS (
    INSERT INTO jobs (
        job_id, tenant, name, kind, mode, options, task_shard_count, result_layout, state, reason, created_at,
        expires_at, run_id, source, source_key, version, task_store, bucket
    )
    SELECT :job_id::text, :tenant::text, :name, :kind, :mode, :options, :task_shard_count, :result_layout,
        :state, :reason, :created_at, :expires_at, :run_id::text, :source, :source_key,
        :version, :task_store, :bucket
    FROM granted
), run AS (
    INSERT INTO runs (
        run_id, job_id, number, state, total, last_batch, created_at, ended_at, sealed, invalid, touched_at, lineage,
        reason_code
    )
    SELECT :run_id::text, :job_id::text, :number, :run_state, :total, :last_batch, :run_created_at::double precision,
        :ended_at, :sealed, :invalid, :run_created_at::double precision, :lineage, :reason_code
    FROM granted
), numbered AS (
    INSERT INTO task_runs (run_id, tenant)
    SELECT :run_id::text, :tenant::text FROM granted WHERE cardinality(:indexes::bigint[]) > 0
    RETURNING run_no
), put AS (
    INSERT INTO tasks (run_no, idx, shard, sort_key, tag, input, prior)
    SELECT numbered.run_no, s.* FROM numbered CROSS JOIN unnest(
        :indexes::bigint[], :shards::smallint[], :sort_keys::bigint[], :tags::text[], :inputs::text[], :priors::text[]
    ) AS s
), sent AS (
    INSERT INTO messages (queue, visible_at, body)
    SELECT :queue::text, m.visible_at, m.body
    FROM granted CROSS JOIN unnest(:times::double precision[], :bodies::bytea[]) AS m (visible_at, body)
), turn AS MATERIALIZED (
    SELECT pg_advisory_xact_lock(hashtextextended(current_schema() || ' outbox ' || :job_id::text, 0)) FROM granted
), told AS (
    INSERT INTO outbox (event_id, tenant, job_id, run_id, event, at, data)
    SELECT :event_id, :tenant::text, :job_id::text, :run_id::text, :event, :at, :data FROM turn
)
SELECT count(*) FROM granted;
