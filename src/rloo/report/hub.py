"""Pushing what a run has made to the Hugging Face hub: when, and under which name.

The only file that talks to the hub's interface. Knows nothing of models: it uploads folders.
"""

from __future__ import annotations

from concurrent.futures import Future
from pathlib import Path
from typing import Any

from rloo.config.config import RLOOConfig

# Checkpoints are pushed by `hub_strategy` alone; the rest is half of something.
LEFT_OUT = ("_*", "checkpoint-*", "tmp-checkpoint-*", "*.tmp")
# What grows while an upload in the background reads it: pushed at the end.
GROWING = ("*.jsonl", "runs/*")


class Hub:
    """The repository that a run pushes to: `hub_model_id`, or the name of `output_dir`."""

    def __init__(self, config: RLOOConfig) -> None:
        self._config = config
        self._pending: list[Future[Any]] = []
        self._repo_id: str | None = None

    @property
    def repo_id(self) -> str | None:
        """Its full name, once it exists."""
        return self._repo_id

    def create(self, *, token: str | None = None, private: bool | None = None) -> None:
        """Make the repository, and its branch `hub_revision`, unless they are there."""
        config = self._config
        private = config.hub_private_repo if private is None else private
        name = config.hub_model_id or Path(config.output_dir).absolute().name
        api = _api(token or config.hub_token)
        self._repo_id = api.create_repo(name, private=private, exist_ok=True).repo_id
        if config.hub_revision is not None:
            api.create_branch(self._repo_id, branch=config.hub_revision, exist_ok=True)

    def upload(
        self,
        folder: Path,
        message: str,
        *,
        place: str | None = None,
        token: str | None = None,
        revision: str | None = None,
        wait: bool = True,
    ) -> Any:
        """Upload a folder to `place` in the repository, and return the commit; without `wait` a
        future, which `finish` waits for too. Raises what the hub's library raises."""
        uploaded = _api(token or self._config.hub_token).upload_folder(
            repo_id=self._repo_id,
            folder_path=folder,
            path_in_repo=place,
            commit_message=message,
            revision=revision or self._config.hub_revision,
            ignore_patterns=[*LEFT_OUT, *(() if wait else GROWING)],
            run_as_future=not wait,
        )
        if not wait:
            self._pending.append(uploaded)
        return uploaded

    def push_checkpoint(self, output_dir: Path, checkpoint: Path, step: int) -> None:
        """Begin what `hub_strategy` pushes at a save: the model's folder, and the checkpoint."""
        message = f"Training in progress, step {step}"
        places = {"checkpoint": "last-checkpoint", "all_checkpoints": checkpoint.name}
        self.upload(output_dir, message, wait=False)
        if place := places.get(self._config.hub_strategy):
            self.upload(checkpoint, f"{message}, checkpoint", place=place, wait=False)

    def finish(self) -> list[BaseException]:
        """Wait for everything under way; returns what went wrong."""
        errors = [error for future in self._pending if (error := future.exception())]
        self._pending = []
        return errors


def _api(token: str | None) -> Any:
    from huggingface_hub import HfApi

    return HfApi(token=token)
