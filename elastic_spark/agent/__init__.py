"""What runs in the executor's long-lived Spark task: registers, keeps one warm worker process, reports its end."""
