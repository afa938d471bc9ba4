"""The command line: thin click commands, each one call into the rooms plus its printing."""
