"""Commands and libraries around a server with the chunk cache; none of them needs SGLang.

`command` is the door (`chunk-cache`), `command_line` what its subcommands have in common. `conditions` are methods and
ratios as a user writes them, `server_client` asks a running server, `own_server` starts one, `local_tokenizer` reads a
tokenizer of this machine. `passages` is for programs that send passages, `routing` and `holders` are for programs in
front of several servers.
"""
