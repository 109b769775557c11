-- name: insert_document
-- An expired document counts as missing.
INSERT INTO documents (kind, tenant, id, body, version, due_at, expires_at, job_id, upload_id)
VALUES (:kind, :tenant, :id, :body, :version, :due_at, :expires_at, :job_id, :upload_id)
ON CONFLICT (kind, tenant, id) DO UPDATE SET
    body = excluded.body, version = excluded.version, due_at = excluded.due_at, expires_at = excluded.expires_at,
    job_id = excluded.job_id, upload_id = excluded.upload_id
WHERE expires_at <= :now;

-- name: document
SELECT kind, tenant, id, body, version, due_at, expires_at, job_id, upload_id FROM documents
WHERE kind = :kind AND tenant = :tenant AND id = :id AND (expires_at IS NULL OR expires_at > :now);

-- name: replaced_upload
SELECT upload_id FROM documents
WHERE kind = :kind AND tenant = :tenant AND id = :id AND version = :version
    AND upload_id IS NOT NULL AND upload_id IS NOT :upload_id;

-- name: replace_document
UPDATE documents
SET body = :body, version = version + 1, due_at = :due_at, expires_at = :expires_at, job_id = :job_id,
    upload_id = :upload_id
WHERE kind = :kind AND tenant = :tenant AND id = :id AND version = :version
    AND (expires_at IS NULL OR expires_at > :now);

-- name: remove_document
DELETE FROM documents WHERE kind = :kind AND tenant = :tenant AND id = :id AND version = :version RETURNING upload_id;

-- name: documents
SELECT kind, tenant, id, body, version, due_at, expires_at, job_id, upload_id FROM documents
WHERE kind = :kind AND tenant = :tenant AND id > :after AND (expires_at IS NULL OR expires_at > :now)
ORDER BY id LIMIT :limit;

-- name: documents_of_job
SELECT kind, tenant, id, body, version, due_at, expires_at, job_id, upload_id FROM documents
WHERE job_id = :job_id AND kind = :kind AND tenant = :tenant AND id > :after
    AND (expires_at IS NULL OR expires_at > :now)
ORDER BY id LIMIT :limit;

-- name: due_documents
SELECT kind, tenant, id, body, version, due_at, expires_at, job_id, upload_id FROM documents
WHERE kind = :kind AND due_at >= :after AND due_at <= :by ORDER BY due_at LIMIT :limit;
