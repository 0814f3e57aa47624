"""Small checkpoints of no run."""

from rloo.model.training_state import capture_rng
from rloo.trainer.checkpoint import Checkpoint, save_checkpoint
from support.optimizers import make_optimizer, state_of, take_step


def write_model(folder):
    (folder / "model.safetensors").write_bytes(b"weights" * 100)
    (folder / "adapter").mkdir()
    (folder / "adapter" / "config.json").write_text("{}")


def make_checkpoint(step=1, **changes):
    model, optimizer = make_optimizer()
    take_step(model, optimizer)
    parts = {
        "optimizer": state_of(model, optimizer),
        "scheduler": {"last_epoch": step, "_last_lr": [0.1]},
        "rng": capture_rng(),
        "trainer_state": {"step": step, "log": [{"loss": 0.1 + 0.2}]},
    }
    return Checkpoint(step=step, **{**parts, **changes})


def save(directory, step=1, *, keep=None, write=write_model):
    return save_checkpoint(directory, make_checkpoint(step), write_model=write, keep=keep)


def names(directory):
    return sorted(path.name for path in directory.iterdir())
