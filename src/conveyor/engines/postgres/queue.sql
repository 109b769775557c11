-- name: send
INSERT INTO messages (queue, visible_at, body)
SELECT :queue::text, m.visible_at, m.body
FROM unnest(:times::double precision[], :bodies::bytea[]) AS m (visible_at, body);

-- name: take
WITH due AS MATERIALIZED (
    SELECT m.id, m.visible_at
    FROM unnest(:queues::text[], :limits::integer[], :floors::double precision[], :floor_ids::bigint[])
        AS w (queue, most, floor, floor_id)
    CROSS JOIN LATERAL (
        SELECT id, visible_at FROM messages
        WHERE queue = w.queue AND visible_at <= :now AND (visible_at, id) > (w.floor, w.floor_id)
        ORDER BY visible_at, id LIMIT w.most FOR UPDATE SKIP LOCKED
    ) AS m
)
UPDATE messages AS m
SET visible_at = :until, receives = m.receives + 1, delivery = :delivery, started = false
FROM due WHERE m.id = due.id
RETURNING m.queue, m.id, m.receives, m.body, m.starts, due.visible_at;

-- name: taken
SELECT queue, id, receives, body, starts FROM messages
WHERE queue = ANY(:queues::text[]) AND delivery = :delivery ORDER BY id;

-- The statements on receipts lock one message after the other, and are given them in order of id: who extends and who
-- acknowledges the same messages do not wait for each other in a ring.

-- name: extend
WITH mine AS MATERIALIZED (
    SELECT m.id, r.delivery FROM unnest(:ids::bigint[], :deliveries::text[]) AS r (id, delivery)
    CROSS JOIN LATERAL (
        SELECT id FROM messages WHERE id = r.id AND delivery = r.delivery AND queue = :queue FOR UPDATE
    ) AS m
)
UPDATE messages AS m SET visible_at = :until FROM mine WHERE m.id = mine.id RETURNING m.id, mine.delivery;

-- name: mark_started
WITH mine AS MATERIALIZED (
    SELECT m.id, r.delivery FROM unnest(:ids::bigint[], :deliveries::text[]) AS r (id, delivery)
    CROSS JOIN LATERAL (
        SELECT id FROM messages WHERE id = r.id AND delivery = r.delivery AND queue = :queue AND NOT started FOR UPDATE
    ) AS m
)
UPDATE messages AS m SET starts = m.starts + 1, started = true FROM mine WHERE m.id = mine.id RETURNING m.id, mine.delivery;

-- name: ack
WITH mine AS MATERIALIZED (
    SELECT m.id, r.delivery FROM unnest(:ids::bigint[], :deliveries::text[]) AS r (id, delivery)
    CROSS JOIN LATERAL (
        SELECT id FROM messages WHERE id = r.id AND delivery = r.delivery AND queue = :queue FOR UPDATE
    ) AS m
)
DELETE FROM messages AS m USING mine WHERE m.id = mine.id RETURNING m.id, mine.delivery;

-- name: there
SELECT id FROM messages WHERE id = ANY(:ids::bigint[]);

-- name: release
WITH mine AS MATERIALIZED (
    SELECT m.id, r.delivery FROM unnest(:ids::bigint[], :deliveries::text[]) AS r (id, delivery)
    CROSS JOIN LATERAL (
        SELECT id FROM messages WHERE id = r.id AND delivery = r.delivery AND queue = :queue FOR UPDATE
    ) AS m
)
UPDATE messages AS m
SET visible_at = :until, receives = m.receives - 1, starts = m.starts - m.started::integer, started = false,
    delivery = NULL
FROM mine WHERE m.id = mine.id RETURNING m.id, mine.delivery;

-- name: have_delayed
SELECT w.queue FROM unnest(:queues::text[]) AS w (queue) WHERE EXISTS (
    SELECT FROM messages WHERE queue = w.queue AND visible_at > :now AND delivery IS NULL OFFSET 0
);

-- name: have_hidden
SELECT w.queue, w.beyond FROM unnest(:queues::text[], :beyonds::double precision[]) AS w (queue, beyond) WHERE EXISTS (
    SELECT FROM messages WHERE queue = w.queue AND visible_at > w.beyond OFFSET 0
);

-- name: hasten
WITH delayed AS MATERIALIZED (
    SELECT id FROM messages WHERE queue = :queue AND visible_at > :now AND delivery IS NULL
    ORDER BY id LIMIT :limit FOR UPDATE SKIP LOCKED
)
UPDATE messages AS m SET visible_at = :now FROM delayed WHERE m.id = delayed.id;

-- name: reveal
WITH hidden AS MATERIALIZED (
    SELECT id FROM messages WHERE queue = :queue AND visible_at > :beyond
    ORDER BY id LIMIT :limit FOR UPDATE SKIP LOCKED
)
UPDATE messages AS m SET visible_at = :now FROM hidden WHERE m.id = hidden.id;

-- name: dead_letter
WITH mine AS MATERIALIZED (
    SELECT m.id, r.delivery FROM unnest(:ids::bigint[], :deliveries::text[]) AS r (id, delivery)
    CROSS JOIN LATERAL (
        SELECT id FROM messages WHERE id = r.id AND delivery = r.delivery AND queue = :queue FOR UPDATE
    ) AS m
), gone AS (
    DELETE FROM messages AS m USING mine WHERE m.id = mine.id RETURNING m.queue, m.body
)
INSERT INTO dead_letters (queue, body, reason, at) SELECT queue, body, :reason, :now FROM gone;

-- name: dead_letters
SELECT id, queue, body, reason, at FROM dead_letters WHERE id > :after ORDER BY id LIMIT :limit;

-- name: letters
SELECT id, queue, body, reason, at FROM dead_letters WHERE id = ANY(:ids::bigint[]) ORDER BY id;

-- name: lock_letters
SELECT id FROM dead_letters WHERE id = ANY(:ids::bigint[]) ORDER BY id FOR UPDATE;

-- name: redrive
WITH gone AS (
    DELETE FROM dead_letters WHERE id = ANY(:ids::bigint[]) RETURNING queue, body
)
INSERT INTO messages (queue, visible_at, body) SELECT queue, :now, body FROM gone;

-- name: discard
DELETE FROM dead_letters WHERE id = ANY(:ids::bigint[]);

-- name: depth
SELECT w.queue, d.ready, d.held, d.delayed FROM unnest(:queues::text[]) AS w (queue)
CROSS JOIN LATERAL (
    SELECT count(*) FILTER (WHERE visible_at <= :now) AS ready,
        count(*) FILTER (WHERE visible_at > :now AND delivery IS NOT NULL) AS held,
        count(*) FILTER (WHERE visible_at > :now AND delivery IS NULL) AS delayed
    FROM messages WHERE queue = w.queue
) AS d;

-- name: since
SELECT min(visible_at) FROM messages WHERE queue = :queue AND visible_at <= :now;

-- name: next_queue
SELECT min(queue) FROM messages WHERE queue > :after;

-- name: drop
DELETE FROM messages
WHERE ctid = ANY(ARRAY(SELECT ctid FROM messages WHERE queue = ANY(:queues::text[]) LIMIT :limit));
