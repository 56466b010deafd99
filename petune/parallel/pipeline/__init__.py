"""Pipeline parallelism: stages, what travels between them, and the schedules."""
