"""Export: a job's results as files. Makes them in the background, part by part, resumably, in constant memory."""
