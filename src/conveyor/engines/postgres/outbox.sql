-- name: insert_event
-- Events of one job are numbered in the order of their commits: a reader that has seen one has seen all before it.
-- Always the last step of a transaction, so that no transaction waits for a row while it holds this lock.
WITH turn AS MATERIALIZED (
    SELECT pg_advisory_xact_lock(hashtextextended(current_schema() || ' outbox ' || :job_id, 0))
)
INSERT INTO outbox (event_id, tenant, job_id, run_id, event, at, data)
SELECT :event_id, :tenant, :job_id::text, :run_id, :event, :at, :data FROM turn;

-- name: stored_event
SELECT 1 FROM outbox WHERE event_id = :event_id;

-- name: events
SELECT seq, at, event, run_id, NULL, data, event_id FROM outbox
WHERE tenant = :tenant AND job_id = :job_id AND seq > :after ORDER BY seq LIMIT :limit;

-- name: undispatched
SELECT event_id, tenant, job_id, run_id, event, at, data FROM outbox
WHERE NOT dispatched ORDER BY seq LIMIT :limit;

-- name: mark_dispatched
UPDATE outbox SET dispatched = true WHERE NOT dispatched AND event_id = ANY(:event_ids::text[]);
