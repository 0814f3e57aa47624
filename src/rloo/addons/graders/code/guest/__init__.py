"""Code that runs inside the sandbox, in a separate interpreter with only the standard library.

`rloo.addons.graders.code.sandbox_pool` sends these files to the sandbox as text. The training
process calls nothing in this package. There are four processes, named here by their modules, from
the outermost to the innermost: `guest_main` waits for requests; `judge` (with `test_cases`) decides
whether a program passes its tests; `process_tree` is the parent of the program and runs in the
program's namespaces; `program` runs the hostile program. Each process is a fork of the previous
one. A parent forks before it reads data that the child must not know."""
