"""Accept: checks a request for a job, writes the job, its tasks and references; reruns, schedules, control, redrive."""
