-- Documents and the outbox get the names that the code has for them.
ALTER TABLE rows RENAME TO documents;
ALTER INDEX rows_pkey RENAME TO documents_pkey;
ALTER INDEX rows_due RENAME TO documents_due;
ALTER INDEX rows_by_job RENAME TO documents_by_job;
ALTER INDEX rows_expiring RENAME TO documents_expiring;
ALTER INDEX rows_by_upload RENAME TO documents_by_upload;

ALTER TABLE notices RENAME TO outbox;
ALTER TABLE outbox RENAME COLUMN notice_id TO event_id;
-- True once the dispatcher has sent the event to every subscriber.
ALTER TABLE outbox RENAME COLUMN told TO dispatched;
ALTER INDEX notices_pkey RENAME TO outbox_pkey;
ALTER INDEX notices_notice_id_key RENAME TO outbox_event_id_key;
ALTER INDEX notices_by_job RENAME TO outbox_by_job;
ALTER INDEX notices_untold RENAME TO outbox_undispatched;
ALTER SEQUENCE notices_seq_seq RENAME TO outbox_seq_seq;
