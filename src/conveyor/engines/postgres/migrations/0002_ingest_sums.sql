-- What the ranges of a run have together (ingest_sums.py). Kept, so that nobody adds up the batches of an open job.
ALTER TABLE runs
    ADD COLUMN ranges bigint NOT NULL DEFAULT 0,
    ADD COLUMN ranges_done bigint NOT NULL DEFAULT 0,
    ADD COLUMN range_tasks bigint NOT NULL DEFAULT 0,
    ADD COLUMN range_invalid bigint NOT NULL DEFAULT 0,
    ADD COLUMN bytes_read bigint NOT NULL DEFAULT 0,
    ADD COLUMN bytes_known bigint NOT NULL DEFAULT 0,
    ADD COLUMN ranges_endless bigint NOT NULL DEFAULT 0;

UPDATE runs SET ranges = s.ranges, ranges_done = s.ranges_done, range_tasks = s.range_tasks,
    range_invalid = s.range_invalid, bytes_read = s.bytes_read, bytes_known = s.bytes_known,
    ranges_endless = s.ranges_endless
FROM (
    SELECT run_id, count(*) AS ranges, count(*) FILTER (WHERE done) AS ranges_done, sum(tasks) AS range_tasks,
        sum(invalid) AS range_invalid, sum(least(byte_offset, coalesce(stop, byte_offset)) - first_byte) AS bytes_read,
        coalesce(sum(stop - first_byte), 0) AS bytes_known, count(*) - count(stop) AS ranges_endless
    FROM (SELECT *, coalesce(end_byte, CASE WHEN done THEN byte_offset END) AS stop FROM ranges) AS each
    GROUP BY run_id
) AS s
WHERE s.run_id = runs.run_id;
