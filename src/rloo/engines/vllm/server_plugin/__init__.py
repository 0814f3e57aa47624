"""Code that runs in a vLLM server, whose environment may lack this package. The code uses only the
standard library. This folder is on the server's module path. The run itself does not call this
code."""
