-- The order of task_id is kept for each slab of 32,768 neighbouring tasks: ids are hashes, so that one index over a whole
-- run of millions would change a page for every task. A slab fits into the cache; a listing merges the slabs of its run.
DROP INDEX tasks_by_id;
CREATE INDEX tasks_by_id ON tasks (run_no, shard, idx >> 15, sort_key);
