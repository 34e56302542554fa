"""What runs in the Horovod worker process beside the user's function."""
