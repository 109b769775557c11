-- A task of a rerun has the latest outcome from the runs before it: the digit of its status and its error code. A rerun
-- counts those that it replaces, so that the latest outcomes of all tasks of a job are counted without a scan.
ALTER TABLE tasks ADD COLUMN prior TEXT;
ALTER TABLE task_runs ADD COLUMN rerun INTEGER NOT NULL DEFAULT 0;
ALTER TABLE task_runs ADD COLUMN replaced_succeeded INTEGER NOT NULL DEFAULT 0;
ALTER TABLE task_runs ADD COLUMN replaced_failed INTEGER NOT NULL DEFAULT 0;
ALTER TABLE task_runs ADD COLUMN replaced_cancelled INTEGER NOT NULL DEFAULT 0;
ALTER TABLE task_errors ADD COLUMN replaced INTEGER NOT NULL DEFAULT 0;
