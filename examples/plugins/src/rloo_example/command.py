"""A command: `rloo steps FOLDER`."""

from pathlib import Path

from rloo.tracking.run_reader import read_begun


def steps(arguments, signals):
    """Print the number of steps of the run in a folder, and its last reward."""
    if len(arguments) != 1:
        raise ValueError("steps takes the folder of a run (its output_dir)")
    run = read_begun(Path(arguments[0]))
    rewards = [row["reward"] for row in run.metrics if "reward" in row]
    print(f"{run.steps} steps, reward {rewards[-1]:.3f}" if rewards else f"{run.steps} steps")
    return 0
