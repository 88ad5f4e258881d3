"""Commands and libraries around a server with the chunk cache; none of them needs SGLang."""
