"""Pipeline parallelism: schedules as data."""
