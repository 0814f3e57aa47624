"""Code that runs in a vLLM server, whose environment may lack this package. The code uses only the
standard library and packages that vLLM needs. This folder is on the server's module path."""
