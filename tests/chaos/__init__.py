"""Seeded churn on real agents, workers and the real controller, without Spark: see `schedule`, `world` and `fuzz`."""
