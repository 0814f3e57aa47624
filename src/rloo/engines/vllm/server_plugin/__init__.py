"""What runs in a server of vLLM, whose environment may not have this package: the standard library
alone. This folder is on the server's module path, nothing here is called by the run itself."""
