-- name: claim
WITH granted AS (
    INSERT INTO idempotency (tenant, route, key, fingerprint, subject, lease_until, status, body, expires_at)
    VALUES (:tenant, :route, :key, :fingerprint, :subject, :lease_until, 0, '', :expires_at)
    ON CONFLICT (tenant, route, key) DO UPDATE SET
        fingerprint = excluded.fingerprint,
        subject = CASE WHEN idempotency.expires_at <= :now THEN excluded.subject ELSE idempotency.subject END,
        lease_until = excluded.lease_until, status = 0, body = '', expires_at = excluded.expires_at
    WHERE idempotency.expires_at <= :now OR (
        -- One that lasts longer than a new one would was set by a clock that was ahead.
        idempotency.status = 0 AND idempotency.fingerprint = excluded.fingerprint
        AND (idempotency.lease_until <= :now OR idempotency.lease_until > excluded.lease_until + :slack)
    )
    RETURNING tenant, route, key, fingerprint, subject, lease_until, expires_at, status, body
)
SELECT true AS granted, granted.* FROM granted
UNION ALL
SELECT false, tenant, route, key, fingerprint, subject, lease_until, expires_at, status, body FROM idempotency
WHERE tenant = :tenant AND route = :route AND key = :key AND NOT EXISTS (SELECT FROM granted);

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

-- name: insert_upload
INSERT INTO uploads (upload_id, tenant, key, size, sha256, created_at, expires_at, stored_at)
VALUES (:upload_id, :tenant, :key, :size, :sha256, :created_at, :expires_at, :stored_at);

-- name: upload
SELECT tenant, upload_id, key, size, sha256, created_at, expires_at, stored_at FROM uploads
WHERE upload_id = :upload_id AND (
    expires_at > :now
    OR EXISTS (SELECT FROM jobs WHERE source_key = uploads.key)
    OR EXISTS (SELECT FROM documents WHERE upload_id = uploads.upload_id)
);

-- name: release_upload
UPDATE uploads SET expires_at = least(expires_at, :now)
WHERE upload_id = :upload_id
    AND NOT EXISTS (SELECT FROM jobs WHERE source_key = uploads.key)
    AND NOT EXISTS (SELECT FROM documents WHERE upload_id = uploads.upload_id);

-- name: stored_upload
SELECT 1 FROM uploads WHERE upload_id = :upload_id;

-- name: keep_upload
UPDATE uploads SET expires_at = greatest(expires_at, :until) WHERE upload_id = :upload_id;

-- name: mark_stored
UPDATE uploads SET stored_at = :now WHERE upload_id = :upload_id AND stored_at IS NULL AND expires_at > :now;

-- name: stored_at
SELECT stored_at FROM uploads WHERE upload_id = :upload_id;

-- name: expired_uploads
SELECT tenant, upload_id, key, size, sha256, created_at, expires_at, stored_at FROM uploads
WHERE expires_at <= :by
    AND NOT EXISTS (SELECT FROM jobs WHERE source_key = uploads.key)
    AND NOT EXISTS (SELECT FROM documents WHERE upload_id = uploads.upload_id)
ORDER BY expires_at LIMIT :limit;

-- name: purge_upload
DELETE FROM uploads
WHERE upload_id = :upload_id AND expires_at <= :now
    AND NOT EXISTS (SELECT FROM jobs WHERE source_key = uploads.key)
    AND NOT EXISTS (SELECT FROM documents WHERE upload_id = uploads.upload_id);

-- name: purge_claims
DELETE FROM idempotency WHERE ctid = ANY(ARRAY(
    SELECT ctid FROM idempotency WHERE expires_at <= :now ORDER BY expires_at LIMIT :limit FOR UPDATE SKIP LOCKED
));

-- name: purge_documents
-- The owner of a due document still acts on it, expired or not.
DELETE FROM documents WHERE ctid = ANY(ARRAY(
    SELECT ctid FROM documents WHERE expires_at <= :now AND due_at IS NULL
    ORDER BY expires_at LIMIT :limit FOR UPDATE SKIP LOCKED
));

-- name: insert_key
INSERT INTO keys (key_id, tenant, name, secret_sha256, created_at, revoked_at, expires_at, admin)
VALUES (:key_id, :tenant, :name, :secret_sha256, :created_at, :revoked_at, :expires_at, :admin);

-- name: key
SELECT key_id, tenant, name, secret_sha256, created_at, revoked_at, expires_at, admin FROM keys
WHERE key_id = :key_id;

-- name: keys
SELECT key_id, tenant, name, secret_sha256, created_at, revoked_at, expires_at, admin FROM keys
WHERE :tenant::text IS NULL OR tenant = :tenant ORDER BY created_at, key_id COLLATE "C";

-- name: revoke_key
UPDATE keys SET revoked_at = coalesce(revoked_at, :at) WHERE key_id = :key_id;
