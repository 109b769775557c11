-- name: claim
INSERT INTO idempotency (tenant, route, key, fingerprint, subject, lease_until, status, body, expires_at)
VALUES (:tenant, :route, :key, :fingerprint, :subject, :lease_until, 0, x'', :expires_at)
ON CONFLICT (tenant, route, key) DO UPDATE SET
    fingerprint = excluded.fingerprint,
    subject = iif(expires_at <= :now, excluded.subject, subject),
    lease_until = excluded.lease_until, status = 0, body = x'', expires_at = excluded.expires_at
WHERE expires_at <= :now OR (
    -- One that lasts longer than a new one would was set by a clock that was ahead.
    status = 0 AND (lease_until <= :now OR lease_until > excluded.lease_until + :slack)
    AND fingerprint = excluded.fingerprint
);

-- name: idempotency
SELECT tenant, route, key, fingerprint, subject, lease_until, expires_at, status, body FROM idempotency
WHERE tenant = :tenant AND route = :route AND key = :key;

-- name: answer
UPDATE idempotency SET status = :status, body = :body, expires_at = :expires_at
WHERE tenant = :tenant AND route = :route AND key = :key AND status = 0
    AND subject = :subject AND fingerprint = :fingerprint;

-- name: release_claim
DELETE FROM idempotency
WHERE tenant = :tenant AND route = :route AND key = :key AND status = 0 AND subject = :subject
    AND lease_until = :lease_until;

-- name: keep_upload
UPDATE uploads SET expires_at = max(expires_at, :until) WHERE upload_id = :upload_id;

-- name: insert_upload
INSERT INTO uploads (upload_id, tenant, key, size, sha256, created_at, expires_at, stored_at)
VALUES (:upload_id, :tenant, :key, :size, :sha256, :created_at, :expires_at, :stored_at);

-- name: upload
SELECT tenant, upload_id, key, size, sha256, created_at, expires_at, stored_at FROM uploads
WHERE upload_id = :upload_id AND (
    expires_at > :now
    OR EXISTS (SELECT 1 FROM jobs WHERE source_key = uploads.key)
    OR EXISTS (SELECT 1 FROM documents WHERE upload_id = uploads.upload_id)
);

-- name: release_upload
UPDATE uploads SET expires_at = min(expires_at, :now)
WHERE upload_id = :upload_id
    AND NOT EXISTS (SELECT 1 FROM jobs WHERE source_key = uploads.key)
    AND NOT EXISTS (SELECT 1 FROM documents WHERE upload_id = uploads.upload_id);

-- name: mark_stored
UPDATE uploads SET stored_at = :now WHERE upload_id = :upload_id AND stored_at IS NULL AND expires_at > :now;

-- name: expired_uploads
SELECT tenant, upload_id, key, size, sha256, created_at, expires_at, stored_at FROM uploads
WHERE expires_at <= :by
    AND NOT EXISTS (SELECT 1 FROM jobs WHERE source_key = uploads.key)
    AND NOT EXISTS (SELECT 1 FROM documents WHERE upload_id = uploads.upload_id)
ORDER BY expires_at LIMIT :limit;

-- name: purge_upload
DELETE FROM uploads
WHERE upload_id = :upload_id AND expires_at <= :now
    AND NOT EXISTS (SELECT 1 FROM jobs WHERE source_key = uploads.key)
    AND NOT EXISTS (SELECT 1 FROM documents WHERE upload_id = uploads.upload_id);

-- name: any_expired
SELECT 1 FROM (
    SELECT * FROM (SELECT 1 FROM idempotency WHERE expires_at <= :now LIMIT 1)
    UNION ALL SELECT * FROM (SELECT 1 FROM documents WHERE expires_at <= :now AND due_at IS NULL LIMIT 1)
);

-- name: purge_claims
DELETE FROM idempotency WHERE (tenant, route, key) IN (
    SELECT tenant, route, key FROM idempotency WHERE expires_at <= :now LIMIT :limit
);

-- name: purge_documents
-- The owner of a due document still acts on it, expired or not.
DELETE FROM documents WHERE (kind, tenant, id) IN (
    SELECT kind, tenant, id FROM documents WHERE expires_at <= :now AND due_at IS NULL LIMIT :limit
);

-- name: insert_key
INSERT INTO keys (key_id, tenant, name, secret_sha256, created_at, revoked_at, expires_at, admin)
VALUES (:key_id, :tenant, :name, :secret_sha256, :created_at, :revoked_at, :expires_at, :admin);

-- name: key
SELECT key_id, tenant, name, secret_sha256, created_at, revoked_at, expires_at, admin FROM keys
WHERE key_id = :key_id;

-- name: keys
SELECT key_id, tenant, name, secret_sha256, created_at, revoked_at, expires_at, admin FROM keys
WHERE :tenant IS NULL OR tenant = :tenant ORDER BY created_at, key_id;

-- name: revoke_key
UPDATE keys SET revoked_at = :at WHERE key_id = :key_id AND revoked_at IS NULL;
