"""What a server was started with, in every one of its processes."""
