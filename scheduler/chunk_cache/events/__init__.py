"""What a server tells routers of the chunks that it holds."""
