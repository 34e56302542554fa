"""What runs on the Spark driver: the controller, the Spark adapter, the rendezvous of each generation."""
