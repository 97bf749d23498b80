"""Places that run a job."""
