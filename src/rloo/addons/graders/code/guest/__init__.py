"""What runs behind the wall, in an interpreter that is not the run's: the standard library alone.

These files are sent there as text (`rloo.addons.graders.code.sandbox_pool`), and nothing here is
called by the run itself. From the outside in: `worker` waits, `judge` (with `tests`) decides,
`stage` holds the program's namespaces, `program` is the process of the program itself, which is
hostile. Each is a fork of the one before; a fork is made before its parent has read what the child
must not know."""
