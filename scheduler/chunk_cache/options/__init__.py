"""What a server is started with and what a request asks for, read from JSON and checked."""
