"""Plans a run on other GPUs: counted operations and bytes, rates with their sources, and a
simulation of the queues."""
