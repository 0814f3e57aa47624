"""Starts the processes of a run: on this machine, by Slurm, or by Ray."""
