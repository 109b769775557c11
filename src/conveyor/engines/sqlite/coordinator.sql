-- name: grant
INSERT INTO leases VALUES (:name, :holder, 1, :until)
ON CONFLICT (name) DO UPDATE SET holder = :holder, fence = fence + 1, expires_at = :until
-- One that lasts longer than a new one would was granted by a clock that was ahead.
WHERE expires_at <= :now OR expires_at > :until + :slack OR holder = :holder
RETURNING fence;

-- name: renew
UPDATE leases SET expires_at = :until
WHERE name = :name AND holder = :holder AND fence = :fence AND expires_at > :now;

-- name: forget
DELETE FROM leases WHERE name >= :prefix AND name < :after;

-- name: release_all
UPDATE leases SET expires_at = 0;

-- name: release
UPDATE leases SET expires_at = 0 WHERE name = :name AND holder = :holder AND fence = :fence;
