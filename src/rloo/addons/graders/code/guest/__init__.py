"""Code that runs inside the sandbox, in a separate interpreter with only the standard library.

`rloo.addons.graders.code.sandbox_pool` sends these files to the sandbox as text. The training
process calls nothing in this package. The processes, from the outermost to the innermost:
`guest_main` waits for requests; `judge` (with `test_cases`) decides; `process_tree` is the parent
in the program's namespaces; `program` runs the hostile program. Each process is a fork of the
previous one. A parent forks before it reads data that the child must not know."""
