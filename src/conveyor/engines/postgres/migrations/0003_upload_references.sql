-- An upload is kept while a job or a row refers to it: both are found by what they refer to.
CREATE INDEX jobs_by_source ON jobs (source_key) WHERE source_key IS NOT NULL;

ALTER TABLE rows ADD COLUMN upload_id text;
-- As text: JSON of any content can not be asked for a field here (a \u0000 is refused).
UPDATE rows SET upload_id = substring(convert_from(body, 'UTF8') FROM '"upload_id"\s*:\s*"(upload_[0-9a-z]{26})"')
WHERE kind = 'schedule';
CREATE INDEX rows_by_upload ON rows (upload_id) WHERE upload_id IS NOT NULL;
