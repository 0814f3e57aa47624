"""Attributes and methods of TRL's trainer that scripts use and training does not."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import cached_property, partial
from typing import Any

import torch
from accelerate import Accelerator
from datasets import Dataset
from torch.utils.data import DataLoader
from transformers import GenerationConfig, PreTrainedTokenizerBase, TrainerCallback
from transformers.trainer_callback import CallbackHandler
from transformers.trainer_pt_utils import AcceleratorConfig, log_metrics, save_metrics, save_state

from rloo.config.batch_sizes import BatchSizes
from rloo.config.compat.accelerator_config import read_accelerator_config
from rloo.config.config import RLOOConfig
from rloo.config.vllm_options import has_separate_gpus, memory_share
from rloo.data.images import images_of
from rloo.distributed import World
from rloo.model.policy import Policy
from rloo.rewards import RewardSet
from rloo.rewards.reward_model import RewardModel
from rloo.tracking.callbacks import Callback
from rloo.tracking.hub_upload import HubUploader
from rloo.tracking.jsonl import strict
from rloo.tracking.monitor import Monitor, numbers_of
from rloo.trainer.prompt_loading import load_given
from rloo.trainer.subclass_checks import SEAM_OF

# Options that TRL's trainer has as attributes of the same name.
OPTIONS = (
    "beta", "cache_implementation", "chat_template_kwargs", "log_completions", "log_multimodal",
    "log_unique_prompts", "mask_truncated_completions", "max_completion_length", "min_p",
    "normalize_advantages", "num_completions_to_print", "num_generations", "num_iterations",
    "pad_to_multiple_of", "repetition_penalty", "reward_clip_range", "shuffle_dataset",
    "temperature", "top_k", "top_p", "use_vllm", "vllm_gpu_memory_utilization", "vllm_mode",
    "vllm_tensor_parallel_size",
)  # fmt: skip
# Other attributes; assigning one would have no effect and raises an error.
OTHERS = (
    "aux_loss_enabled", "epsilon_high", "epsilon_low", "eos_token_ids", "generation_config",
    "generation_kwargs", "model_wrapped", "num_generations_eval", "reward_weights",
    "router_aux_loss_coef",
)  # fmt: skip


# Methods whose overrides would never be called.
LOADERS = ("get_eval_dataloader", "get_train_dataloader", "num_examples")


def with_stream(args: RLOOConfig) -> RLOOConfig:
    """`args` with the values that TRL sets if the training rows are a stream. Every process reads
    the stream in order. Raises ValueError for `dispatch_batches`: only one process would read."""
    given = read_accelerator_config(getattr(args, "accelerator_config"))  # noqa: B009 - idle
    if given["dispatch_batches"]:
        raise ValueError(
            "accelerator_config has dispatch_batches true and train_dataset is a stream, which "
            "every process reads here. Iterable datasets require `dispatch_batches=False` "
            "(accelerator_config)"
        )
    read = AcceleratorConfig(**given | {"dispatch_batches": False})
    return args.with_values(dataloader_num_workers=0, accelerator_config=read)


class TRLTrainerAttributes:
    """Attributes of a trainer that scripts and callbacks read, and methods that they call."""

    args: RLOOConfig
    batches: BatchSizes
    callback_handler: CallbackHandler
    eval_dataset: Any
    hub: HubUploader
    model: Any
    monitor: Monitor
    policy: Policy
    rewards: RewardSet
    train_dataset: Any
    world: World

    def __getattr__(self, name: str) -> Any:
        if name in OPTIONS and "args" in vars(self):
            value = getattr(self.args, name)
            if name == "vllm_gpu_memory_utilization":
                return memory_share(self.args, separate=has_separate_gpus(self.args))
            return {} if name == "chat_template_kwargs" and value is None else value
        hint = f"; use {SEAM_OF[name]}" if name in SEAM_OF else ""
        raise AttributeError(f"{type(self).__name__!r} object has no attribute {name!r}{hint}")

    @cached_property
    def accelerator(self) -> Accelerator:
        """accelerate's view of the processes: `print`, `is_main_process`, `gather`,
        `gather_for_metrics`, `unwrap_model`, ... Training does not use this object."""
        return Accelerator(cpu=self.world.device.type == "cpu")

    @property
    def hub_model_id(self) -> str | None:
        """The hub repository, once it exists."""
        return self.hub.repo_id

    @property
    def model_wrapped(self) -> Any:
        """The model itself: FSDP2 and DeepSpeed shard it in place, without a wrapper."""
        return self.model

    @property
    def aux_loss_enabled(self) -> bool:
        """Whether the load-balancing loss of experts is added."""
        return self.policy.aux_loss_weight != 0

    @property
    def router_aux_loss_coef(self) -> float:
        """The weight of the load-balancing loss; 0 without experts."""
        return self.policy.aux_loss_weight

    @property
    def num_generations_eval(self) -> int:
        """Completions per prompt in an evaluation."""
        return self.args.num_generations_eval or self.args.num_generations

    @property
    def epsilon_low(self) -> float:
        """The clipping range of a ratio below 1."""
        return self.args.epsilon

    @property
    def epsilon_high(self) -> float:
        """The clipping range of a ratio above 1."""
        high = self.args.epsilon_high
        return self.args.epsilon if high is None else high

    @property
    def eos_token_ids(self) -> list[int]:
        """The tokens that end a completion."""
        return list(self.policy.stop_token_ids)

    @property
    def reward_weights(self) -> torch.Tensor:
        """One weight per reward."""
        weights = self.args.reward_weights or [1.0] * len(self.rewards.names)
        return torch.tensor(weights, dtype=torch.float32)

    @property
    def generation_kwargs(self) -> dict[str, Any]:
        """The sampling options under their names in transformers' `generate`."""
        args, tokenizer = self.args, self.policy.tokenizer
        return {
            "max_new_tokens": args.max_completion_length,
            "do_sample": True,
            "pad_token_id": self.policy.pad_token_id,
            "bos_token_id": tokenizer.bos_token_id,
            "eos_token_id": self.eos_token_ids,
            "temperature": args.temperature,
            "top_p": args.top_p,
            "top_k": args.top_k,
            "min_p": args.min_p,
            "repetition_penalty": args.repetition_penalty,
            **(args.generation_kwargs or {}),
        }

    @cached_property
    def generation_config(self) -> GenerationConfig:
        """The sampling options as a GenerationConfig, for a script's `generate` calls."""
        return GenerationConfig(**self.generation_kwargs, disable_compile=True)

    def refuse_changed(self) -> None:
        """Raise ValueError if the script has changed the options that it passed, and TypeError if
        it has changed `generation_config`. Neither is read after the trainer is set up."""
        self.args.require_unchanged()
        held = vars(self).get("generation_config")
        meant = {**self.generation_kwargs, "disable_compile": True}
        given = {} if held is None else held.to_dict()
        changed = [n for n, v in meant.items() if held is not None and given.get(n) != v]
        if changed:
            raise TypeError(
                f"generation_config was changed ({', '.join(changed)}), where nothing reads it; "
                "use the options of sampling (RLOOConfig) of another trainer"
            )

    def get_train_dataloader(self) -> DataLoader[Any]:
        """A loader whose batches contain this process's rows of one rollout, in the dataset's
        order. Each row is repeated `num_generations` times. Training does not use this loader, and
        orders prompts by `shuffle_dataset`."""
        if self.train_dataset is None:
            raise ValueError("`train_dataset` is required (train_dataset, dataset)")
        size = self.batches.completions_per_rollout // self.world.size
        rows = load_given(self.train_dataset, self.args.dataset_split, self.args)
        return self._loader(rows, size, self.args.num_generations)

    def get_eval_dataloader(self, eval_dataset: Any = None) -> DataLoader[Any]:
        """A loader of `eval_dataset`: rows, or the name of a set; default: the trainer's set."""
        named = self.eval_dataset[eval_dataset] if isinstance(eval_dataset, str) else eval_dataset
        rows = self.eval_dataset if named is None else named
        if rows is None:
            raise ValueError("there is nothing to evaluate on (eval_dataset)")
        loaded = load_given(rows, self.args.eval_split or "train", self.args)
        copies = self.num_generations_eval
        return self._loader(loaded, copies, copies)

    def num_examples(self, dataloader: DataLoader[Any]) -> int:
        """The number of rows in a loader from `get_train_dataloader` or `get_eval_dataloader`, with
        repetitions."""
        return len(dataloader.dataset)  # type: ignore[arg-type]

    def _loader(self, rows: Any, size: int, copies: int) -> DataLoader[Any]:
        workers = 0  # with several workers a stream would be read several times, out of order
        if isinstance(rows, Dataset):
            workers = getattr(self.args, "dataloader_num_workers", 0)
            rows = rows.select([number for number in range(len(rows)) for _ in range(copies)])
        else:
            rows = rows.map(partial(_repeated, copies=copies), batched=True)
        return DataLoader(rows, batch_size=size, num_workers=workers, collate_fn=list)

    def log_metrics(self, split: str, metrics: Mapping[str, Any]) -> None:
        """Print metrics, without intervals."""
        log_metrics(self, split, numbers_of(metrics))

    def save_metrics(self, split: str, metrics: Mapping[str, Any], combined: bool = True) -> None:
        """Write `<split>_results.json` in `args.output_dir`; add the metrics to
        all_results.json."""
        save_metrics(self, split, strict(metrics), combined)

    def save_state(self) -> None:
        """Write trainer_state.json in `args.output_dir`."""
        save_state(self)

    def add_callback(self, callback: Callback) -> None:
        """Add a callback, an object or a class, which receives all later events."""
        self.callback_handler.add_callback(callback)

    def remove_callback(self, callback: Callback) -> None:
        """Remove a callback. A class removes the first callback of that class."""
        self.callback_handler.remove_callback(callback)

    def pop_callback(self, callback: Callback) -> TrainerCallback | None:
        """Remove a callback as `remove_callback` does, and return it."""
        return self.callback_handler.pop_callback(callback)

    def end(self) -> None:
        """Close the resources of the rewards."""
        self.rewards.close()

    @property
    def _logs(self) -> dict[str, Any]:
        """The last rollout in the form of TRL's table of completions, without advantages."""
        groups = self.monitor.last_groups
        several = [
            content for group in groups for content in [group.prompt.content] * len(group.texts)
        ]
        return {
            "prompt": several,
            "completion": [text for group in groups for text in group.texts],
            "images": [i for i in map(images_of, several) if i and self.args.log_multimodal],
            "rewards": _joined([group.scores for group in groups]),
            "extra": _joined([group.extras for group in groups]),
        }


def _joined(columns: Sequence[Mapping[str, Sequence[Any]]]) -> dict[str, list[Any]]:
    names = dict.fromkeys(name for group in columns for name in group)
    return {name: [value for group in columns for value in group.get(name, ())] for name in names}


def _repeated(columns: Mapping[str, Sequence[Any]], copies: int) -> dict[str, list[Any]]:
    return {name: [v for v in values for _ in range(copies)] for name, values in columns.items()}


def functions_of(rewards: RewardSet) -> list[Any]:
    """The rewards as TRL lists them: functions, and the module of a reward model."""
    return [f.model if isinstance(f, RewardModel) else f for f in rewards.functions]


def processing_classes(rewards: RewardSet, given: Any) -> list[PreTrainedTokenizerBase | None]:
    """One tokenizer per reward: the reward model's, or the tokenizer given for a function."""
    functions = rewards.functions
    named = list(given) if isinstance(given, (list, tuple)) else [given] * len(functions)
    return [
        function.tokenizer if isinstance(function, RewardModel) else tokenizer
        for function, tokenizer in zip(functions, named, strict=True)
    ]
