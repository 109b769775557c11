"""Accept: gets a request for a job, checks all of it, writes job, tasks and references, hands on the run's queue."""
