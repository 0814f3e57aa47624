"""An observer, `best`. It writes the step with the best reward to the run's folder."""

from rloo.tracking.observer import Observer


class Best(Observer):
    """Tracks the step with the best mean reward."""

    def __init__(self, run):
        super().__init__(run)
        self.step, self.reward = 0, float("-inf")

    def on_step(self, step, metrics):
        """Compare the step with the best one."""
        if metrics.get("reward", self.reward) > self.reward:
            self.step, self.reward = step, metrics["reward"]

    def on_end(self):
        """Write the best step to a file, and print a line about it."""
        text = f"best reward {self.reward:.3f} in step {self.step}"
        (self.run.folder / "best.txt").write_text(text + "\n")
        self.run.say(text)
