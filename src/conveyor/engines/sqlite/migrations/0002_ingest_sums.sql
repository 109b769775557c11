-- What the ranges of a run have together (ingest_sums.py). Kept, so that nobody adds up the batches of an open job.
ALTER TABLE runs ADD COLUMN ranges INTEGER NOT NULL DEFAULT 0;
ALTER TABLE runs ADD COLUMN ranges_done INTEGER NOT NULL DEFAULT 0;
ALTER TABLE runs ADD COLUMN range_tasks INTEGER NOT NULL DEFAULT 0;
ALTER TABLE runs ADD COLUMN range_invalid INTEGER NOT NULL DEFAULT 0;
ALTER TABLE runs ADD COLUMN bytes_read INTEGER NOT NULL DEFAULT 0;
ALTER TABLE runs ADD COLUMN bytes_known INTEGER NOT NULL DEFAULT 0;
ALTER TABLE runs ADD COLUMN ranges_endless INTEGER NOT NULL DEFAULT 0;

UPDATE runs SET (ranges, ranges_done, range_tasks, range_invalid, bytes_read, bytes_known, ranges_endless) = (
    SELECT count(*), coalesce(sum(done), 0), coalesce(sum(tasks), 0), coalesce(sum(invalid), 0),
        coalesce(sum(min(byte_offset, coalesce(stop, byte_offset)) - start), 0),
        coalesce(sum(stop - start), 0), count(*) - count(stop)
    FROM (
        SELECT done, tasks, invalid, byte_offset, plan ->> '$.start' AS start, coalesce(
            plan ->> '$.end',
            iif(plan ->> '$.compression' = 'none', plan ->> '$.source.size', iif(done, byte_offset, NULL))
        ) AS stop
        FROM ranges WHERE ranges.run_id = runs.run_id
    )
) WHERE run_id IN (SELECT run_id FROM ranges);
