"""What a server tells the outside of its work: Prometheus metrics, traced stages, events."""
