-- name: insert_document
-- An expired document counts as missing.
INSERT INTO documents (kind, tenant, id, body, version, due_at, expires_at, job_id, upload_id)
VALUES (:kind, :tenant, :id, :body, :version, :due_at, :expires_at, :job_id, :upload_id)
ON CONFLICT (kind, tenant, id) DO UPDATE SET
    body = excluded.body, version = excluded.version, due_at = excluded.due_at, expires_at = excluded.expires_at,
    job_id = excluded.job_id, upload_id = excluded.upload_id
WHERE documents.expires_at <= :now;

-- name: document
SELECT kind, tenant, id, body, version, due_at, expires_at, job_id, upload_id FROM documents
WHERE kind = :kind AND tenant = :tenant AND id = :id AND (expires_at IS NULL OR expires_at > :now);

-- name: replace_document
-- Returns the upload that the document referred to before.
UPDATE documents
SET body = :body, version = documents.version + 1, due_at = :due_at, expires_at = :expires_at, job_id = :job_id,
    upload_id = :upload_id
FROM (
    SELECT upload_id AS left_upload FROM documents
    WHERE kind = :kind AND tenant = :tenant AND id = :id AND version = :version FOR NO KEY UPDATE
) AS before
WHERE documents.kind = :kind AND documents.tenant = :tenant AND documents.id = :id AND documents.version = :version
    AND (documents.expires_at IS NULL OR documents.expires_at > :now)
RETURNING before.left_upload;

-- name: remove_document
DELETE FROM documents WHERE kind = :kind AND tenant = :tenant AND id = :id AND version = :version RETURNING upload_id;

-- name: stored_document
SELECT kind, tenant, id, body, version, due_at, expires_at, job_id, upload_id FROM documents
WHERE kind = :kind AND tenant = :tenant AND id = :id;

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
