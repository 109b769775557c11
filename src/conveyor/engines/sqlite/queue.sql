-- name: is_due
SELECT id FROM messages WHERE queue = :queue AND visible_at <= :now LIMIT 1;

-- name: have_due
SELECT json_group_array(wanted.value) FROM json_each(:queues) AS wanted
WHERE EXISTS (SELECT 1 FROM messages WHERE queue = wanted.value AND visible_at <= :now);

-- name: take
UPDATE messages SET visible_at = :until, receives = receives + 1, delivery = delivery + 1, held = 1
WHERE id IN (
    SELECT due.id FROM json_each(:queues) AS wanted CROSS JOIN messages AS due ON due.id IN (
        SELECT id FROM messages WHERE queue = wanted.value AND visible_at <= :now ORDER BY visible_at, id LIMIT :limit
    )
)
RETURNING queue, id, delivery, receives, body, starts;

-- name: due
-- For many receivers: what these statements return is one row of JSON, as in flushes.sql.
SELECT json_group_array(due.id) FROM json_each(:queues) AS wanted CROSS JOIN messages AS due ON due.id IN (
    SELECT id FROM messages WHERE queue = wanted.value AND visible_at <= :now ORDER BY visible_at, id LIMIT :limit
);

-- name: take_due
UPDATE messages SET visible_at = :until, receives = receives + 1, delivery = delivery + 1, held = 1
WHERE id IN (SELECT value FROM json_each(:ids));

-- name: taken
SELECT json_group_array(json_array(queue, id, delivery, receives, hex(body), starts)) FROM messages
WHERE id IN (SELECT value FROM json_each(:ids));

-- name: extend
UPDATE messages SET visible_at = :until
WHERE id = :id AND queue = :queue AND delivery = :delivery AND held = 1;

-- name: mark_started
UPDATE messages SET starts = starts + 1, started = delivery
WHERE id = :id AND queue = :queue AND delivery = :delivery AND held = 1 AND started < delivery;

-- name: ack
DELETE FROM messages WHERE id = :id AND queue = :queue AND delivery = :delivery AND held = 1;

-- name: release
UPDATE messages
SET visible_at = :until, receives = receives - 1, starts = starts - (started = delivery), held = 0
WHERE id = :id AND queue = :queue AND delivery = :delivery AND held = 1;

-- name: release_all
UPDATE messages SET visible_at = :now, held = 0 WHERE held = 1;

-- name: have_delayed
SELECT json_group_array(wanted.value) FROM json_each(:queues) AS wanted
WHERE EXISTS (SELECT 1 FROM messages WHERE queue = wanted.value AND visible_at > :now AND held = 0);

-- name: hasten
UPDATE messages SET visible_at = :now WHERE queue = :queue AND visible_at > :now AND held = 0;

-- name: hidden_beyond
SELECT id FROM messages WHERE queue = :queue AND visible_at > :beyond LIMIT 1;

-- name: reveal
UPDATE messages SET visible_at = :now WHERE queue = :queue AND visible_at > :beyond;

-- name: has_messages
SELECT id FROM messages WHERE queue = :queue LIMIT 1;

-- name: dead_letter
INSERT INTO dead_letters (queue, body, reason, at)
SELECT queue, body, :reason, :now FROM messages
WHERE id = :id AND queue = :queue AND delivery = :delivery AND held = 1;

-- name: dead_letters
SELECT id, queue, body, reason, at FROM dead_letters WHERE id > :after ORDER BY id LIMIT :limit;

-- name: letters
SELECT id, queue, body, reason, at FROM dead_letters WHERE id IN (SELECT value FROM json_each(:ids)) ORDER BY id;

-- name: redrive_send
INSERT INTO messages (queue, visible_at, body)
SELECT queue, :now, body FROM dead_letters WHERE id IN (SELECT value FROM json_each(:ids));

-- name: discard
DELETE FROM dead_letters WHERE id IN (SELECT value FROM json_each(:ids));

-- name: depth
SELECT count(*) FILTER (WHERE visible_at <= :now), count(*) FILTER (WHERE visible_at > :now AND held = 1),
    count(*) FILTER (WHERE visible_at > :now AND held = 0)
FROM messages WHERE queue = :queue;

-- name: since
SELECT min(visible_at) FROM messages WHERE queue = :queue AND visible_at <= :now;

-- name: next_queue
SELECT min(queue) FROM messages WHERE queue > :after;

-- name: drop
DELETE FROM messages WHERE queue = :queue;
