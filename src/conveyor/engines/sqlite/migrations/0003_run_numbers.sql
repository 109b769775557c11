-- A run's number is never handed out twice: rows that a late writer leaves under it belong to no later run. Without
-- AUTOINCREMENT, SQLite gives the highest number away again once its row is deleted.
CREATE TABLE numbered_runs (
    run_no INTEGER PRIMARY KEY AUTOINCREMENT,
    run_id TEXT NOT NULL,
    tenant TEXT NOT NULL,
    succeeded INTEGER NOT NULL DEFAULT 0,
    failed INTEGER NOT NULL DEFAULT 0,
    cancelled INTEGER NOT NULL DEFAULT 0,
    UNIQUE (run_id, tenant)
);
INSERT INTO numbered_runs SELECT run_no, run_id, tenant, succeeded, failed, cancelled FROM task_runs;
DROP TABLE task_runs;
ALTER TABLE numbered_runs RENAME TO task_runs;
-- Above every number that a row was ever found under, whether or not its run is still there.
DELETE FROM sqlite_sequence WHERE name = 'task_runs';
INSERT INTO sqlite_sequence (name, seq) SELECT 'task_runs', max(run_no) FROM (
    SELECT 0 AS run_no
    UNION ALL SELECT max(run_no) FROM task_runs
    UNION ALL SELECT max(run_no) FROM tasks
    UNION ALL SELECT max(run_no) FROM task_events
    UNION ALL SELECT max(run_no) FROM task_errors
);
