-- How many of the succeeded tasks have the body of an earlier outcome, and how many such outcomes a rerun replaces.
ALTER TABLE task_counts ADD COLUMN unchanged bigint NOT NULL DEFAULT 0;
ALTER TABLE task_counts ADD COLUMN replaced_unchanged bigint NOT NULL DEFAULT 0;
