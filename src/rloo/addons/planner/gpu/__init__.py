"""What a run will take on GPUs that are not there: counted operations and bytes, rates with their
sources, and a simulation of what waits for what."""
