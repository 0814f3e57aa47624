"""Plans a run on other GPUs from counted operations and bytes, from rates with their sources, and
from a simulation of the queues."""
