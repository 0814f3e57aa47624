"""Runs inside the sandbox, in a separate interpreter with only the standard library.

`rloo.addons.graders.code.sandbox_pool` sends these files there as text; the run itself calls
nothing here. From the outside in: `guest_main` waits for requests, `judge` (with `test_cases`)
decides, `process_tree` holds the program's namespaces, and `program` is the hostile program's
process. Each process is a fork of the one before, made before the parent has read what the child
must not know."""
