-- An upload is kept while a job or a row refers to it: both are found by what they refer to.
ALTER TABLE jobs ADD COLUMN source_key TEXT;
UPDATE jobs SET source_key = source ->> '$.key' WHERE source IS NOT NULL;
CREATE INDEX jobs_by_source ON jobs (source_key) WHERE source_key IS NOT NULL;

ALTER TABLE rows ADD COLUMN upload_id TEXT;
UPDATE rows SET upload_id = CAST(body AS TEXT) ->> '$.job.source.upload_id' WHERE kind = 'schedule';
CREATE INDEX rows_by_upload ON rows (upload_id) WHERE upload_id IS NOT NULL;
