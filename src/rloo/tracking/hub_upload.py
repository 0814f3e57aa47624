"""Pushing a run's folders to the Hugging Face hub."""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import Future
from pathlib import Path
from typing import Any

from rloo.config.config import RLOOConfig

# Not uploaded with a folder: checkpoints (see `hub_strategy`), earlier runs, incomplete files.
LEFT_OUT = ("_*", "checkpoint-*", "tmp-checkpoint-*", "*.tmp", "rloo-weights-*", "earlier/*")
# Files that grow during a background upload: pushed at the end.
GROWING = ("*.jsonl", "runs/*")


class HubUploader:
    """Uploads folders to the hub repository of a run. The repository's name is `hub_model_id`, by
    default the name of the folder `output_dir`."""

    def __init__(self, config: RLOOConfig) -> None:
        self._config = config
        self._pending: list[Future[Any]] = []
        # The repository's full name, once it exists.
        self.repo_id: str | None = None

    def create(self, *, token: str | None = None, private: bool | None = None) -> None:
        """Create the repository and its branch `hub_revision`, unless they exist."""
        config = self._config
        private = config.hub_private_repo if private is None else private
        name = config.hub_model_id or Path(config.output_dir).absolute().name
        api = _api(token or config.hub_token)
        self.repo_id = api.create_repo(name, private=private, exist_ok=True).repo_id
        if config.hub_revision is not None:
            api.create_branch(self.repo_id, branch=config.hub_revision, exist_ok=True)

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
        """Upload a folder to `place` in the repository and return the commit. Without `wait`,
        return a future, which `finish` also waits for. Raises the errors of huggingface_hub."""
        uploaded = _api(token or self._config.hub_token).upload_folder(
            repo_id=self.repo_id,
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
        """Start the uploads that `hub_strategy` requests at a save: the model, and the
        checkpoint."""
        message = f"Training in progress, step {step}"
        places = {"checkpoint": "last-checkpoint", "all_checkpoints": checkpoint.name}
        self.upload(output_dir, message, wait=False)
        if place := places.get(self._config.hub_strategy):
            self.upload(checkpoint, f"{message}, checkpoint", place=place, wait=False)

    def finish(self, note: Callable[[str], None]) -> None:
        """Wait for all background uploads, and note each failed upload."""
        errors = [error for future in self._pending if (error := future.exception())]
        self._pending = []
        for error in errors:
            note(f"a push to the hub failed: {error}")


def _api(token: str | None) -> Any:
    from huggingface_hub import HfApi

    return HfApi(token=token)
