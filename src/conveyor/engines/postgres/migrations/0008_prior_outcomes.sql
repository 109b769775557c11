-- A task of a rerun has the latest outcome from the runs before it: the digit of its status and its error code. A rerun
-- counts those that it replaces, so that the latest outcomes of all tasks of a job are counted without a scan.
ALTER TABLE tasks ADD COLUMN prior text;
ALTER TABLE task_runs ADD COLUMN rerun boolean NOT NULL DEFAULT false;
ALTER TABLE task_counts
    ADD COLUMN replaced_succeeded bigint NOT NULL DEFAULT 0,
    ADD COLUMN replaced_failed bigint NOT NULL DEFAULT 0,
    ADD COLUMN replaced_cancelled bigint NOT NULL DEFAULT 0;
ALTER TABLE task_errors ADD COLUMN replaced bigint NOT NULL DEFAULT 0;

DO $$
DECLARE
    number integer;
BEGIN
    FOR number IN SELECT run_no FROM task_runs WHERE own LOOP
        EXECUTE format('ALTER TABLE IF EXISTS tasks_%s ADD COLUMN IF NOT EXISTS prior text', number);
    END LOOP;
END
$$;
