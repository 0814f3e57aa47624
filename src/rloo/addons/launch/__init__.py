"""Where the processes of a run are placed: on this machine, by Slurm, or by Ray."""
