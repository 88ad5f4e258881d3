"""Commands and libraries around a server with the chunk cache; none of them needs SGLang.

`command` is the command `chunk-cache`, `command_line` holds what its subcommands share. `conditions` parses methods and
ratios as a user writes them, `server_client` asks a running server, `own_server` starts one, `local_tokenizer` reads a
tokenizer of this machine. `passages` is for programs that send passages, `routing` and `holders` are for programs in
front of several servers.
"""
