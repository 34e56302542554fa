"""elastic_spark: elastic PyTorch training on Spark executors that come and go."""
