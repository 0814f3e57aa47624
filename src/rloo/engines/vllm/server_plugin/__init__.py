"""Code that runs in a vLLM server, whose environment may lack this package. It uses the standard
library only. This folder is on the server's module path; the run itself calls nothing here."""
