"""Finding, checking and loading models: the default pair, local directories, the Hub."""
