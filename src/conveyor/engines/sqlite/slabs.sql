-- name: bounds
-- The first and the last index of a run.
SELECT (SELECT idx FROM tasks WHERE run_no = :run_no ORDER BY idx LIMIT 1),
    (SELECT idx FROM tasks WHERE run_no = :run_no ORDER BY idx DESC LIMIT 1);

-- name: keys
-- Tasks of a shard by their sort keys, in order of task_id: a few of each slab. Left alone, the planner takes the primary
-- key and walks the whole run.
WITH RECURSIVE slabs (slab) AS (SELECT :first_slab UNION ALL SELECT slab + 1 FROM slabs WHERE slab < :last_slab)
SELECT json_group_array(json_array(sort_key, idx) ORDER BY sort_key, idx) FROM (
    SELECT t.sort_key, t.idx FROM slabs CROSS JOIN tasks AS t INDEXED BY tasks_by_id
    WHERE t.run_no = :run_no AND t.shard = :shard AND t.idx >> 15 = slabs.slab
        AND (t.sort_key, t.idx) > (:after_key, :after_idx) AND t.sort_key <= :last_key
    ORDER BY t.sort_key, t.idx LIMIT :rows
);
