-- How many of the succeeded tasks have the body of an earlier outcome, and how many such outcomes a rerun replaces.
ALTER TABLE task_runs ADD COLUMN unchanged INTEGER NOT NULL DEFAULT 0;
ALTER TABLE task_runs ADD COLUMN replaced_unchanged INTEGER NOT NULL DEFAULT 0;
