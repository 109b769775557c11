"""Stage: a list of tasks, however long, becomes one object in blob storage before a job is made of it."""
