-- Documents and the outbox get the names that the code has for them. SQLite cannot rename an index.
DROP INDEX rows_due;
DROP INDEX rows_by_job;
DROP INDEX rows_expiring;
DROP INDEX rows_by_upload;
ALTER TABLE rows RENAME TO documents;
CREATE INDEX documents_due ON documents (kind, due_at) WHERE due_at IS NOT NULL;
CREATE INDEX documents_by_job ON documents (job_id, kind, tenant, id) WHERE job_id IS NOT NULL;
CREATE INDEX documents_expiring ON documents (expires_at) WHERE expires_at IS NOT NULL AND due_at IS NULL;
CREATE INDEX documents_by_upload ON documents (upload_id) WHERE upload_id IS NOT NULL;

DROP INDEX notices_by_job;
DROP INDEX notices_untold;
ALTER TABLE notices RENAME TO outbox;
ALTER TABLE outbox RENAME COLUMN notice_id TO event_id;
-- 1 once the dispatcher has sent the event to every subscriber.
ALTER TABLE outbox RENAME COLUMN told TO dispatched;
CREATE INDEX outbox_by_job ON outbox (tenant, job_id, seq);
CREATE INDEX outbox_undispatched ON outbox (seq) WHERE dispatched = 0;
