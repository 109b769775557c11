-- The bucket of a job, by which processes share out the active ones. A job from before has none, and it is computed.
ALTER TABLE jobs ADD COLUMN bucket INTEGER;
