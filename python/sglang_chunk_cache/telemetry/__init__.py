"""What a server tells the outside about its work: Prometheus metrics, traced stages, events."""
