-- name: insert_event
INSERT INTO outbox (event_id, tenant, job_id, run_id, event, at, data)
VALUES (:event_id, :tenant, :job_id, :run_id, :event, :at, :data);

-- name: insert_events
INSERT INTO outbox (event_id, tenant, job_id, run_id, event, at, data)
SELECT value ->> 0, value ->> 1, value ->> 2, value ->> 3, value ->> 4, value ->> 5, value ->> 6
FROM jsonb_each(:events);

-- name: events
SELECT seq, at, event, run_id, NULL, data, event_id FROM outbox
WHERE tenant = :tenant AND job_id = :job_id AND seq > :after ORDER BY seq LIMIT :limit;

-- name: undispatched
SELECT event_id, tenant, job_id, run_id, event, at, data FROM outbox
WHERE dispatched = 0 ORDER BY seq LIMIT :limit;

-- name: mark_dispatched
UPDATE outbox SET dispatched = 1 WHERE dispatched = 0 AND event_id IN (SELECT value FROM json_each(:event_ids));
