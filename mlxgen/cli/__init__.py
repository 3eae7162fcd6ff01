"""The command line: options, environment, streams, exit codes."""
