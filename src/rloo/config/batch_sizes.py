"""The numbers of prompts and completions of a rollout and of an optimizer step."""

from __future__ import annotations

from dataclasses import dataclass, replace

from rloo.config.options import DEFAULT_BATCH, TrainingOptions


@dataclass(frozen=True, slots=True)
class BatchSizes:
    """The numbers of prompts and completions, summed over all processes. A rollout is TRL's
    generation batch: the completions that are sampled together for `steps_per_rollout` optimizer
    steps. A rollout has `parts_per_rollout` parts of `completions_per_step` completions. Each part
    is used for `num_iterations` steps. The engine gets new weights before every
    `rollouts_per_version`-th rollout."""

    completions_per_step: int
    completions_per_rollout: int
    prompts_per_rollout: int
    num_iterations: int
    rollouts_per_version: int = 1

    @property
    def parts_per_rollout(self) -> int:
        """The number of optimizer steps of one pass over the rollout."""
        return self.completions_per_rollout // self.completions_per_step

    @property
    def steps_per_rollout(self) -> int:
        """The number of optimizer steps on one rollout: num_iterations * steps_per_generation /
        gradient_accumulation_steps."""
        return self.num_iterations * self.parts_per_rollout

    def in_steps(self, num_generations: int) -> BatchSizes:
        """Rollouts of one optimizer step, with new weights as often as before. Asynchronous
        training then begins with the first step's groups, not with the last group of the generation
        batch. If a part is used several times, or has a part of a group, the sizes are unchanged.
        """
        step, parts = self.completions_per_step, self.parts_per_rollout
        if self.num_iterations > 1 or step % num_generations:
            return self
        return replace(
            self,
            completions_per_rollout=step,
            prompts_per_rollout=step // num_generations,
            rollouts_per_version=parts,
        )


def batches_of(options: TrainingOptions, world_size: int) -> BatchSizes:
    """The batch sizes that `options` set for `world_size` processes. Raises ValueError for options
    that contradict each other, and for a rollout that is not a multiple of a group or of an
    optimizer step. (In TRL, a step may begin in one pass over the rollout and end in the next
    pass.)"""
    step = _completions_per_step(options, world_size)
    most = options.prompt_options.max_generations
    if most and (step % options.num_generations or step == options.num_generations):
        raise ValueError(
            f"an optimizer step has {step} completions, num_generations is "
            f"{options.num_generations} and prompt_sampling_kwargs.max_generations is {most}; a "
            "step divides its completions among two or more whole prompts (num_prompts)"
        )
    rollout = _completions_per_rollout(options, step)
    if rollout % options.num_generations:
        raise ValueError(
            f"a rollout has {rollout} completions (per_device_train_batch_size "
            f"{options.per_device_train_batch_size}), not a multiple of num_generations "
            f"{options.num_generations}; set num_prompts (prompts per optimizer step) and leave "
            "the batch sizes out"
        )
    return BatchSizes(
        completions_per_step=step,
        completions_per_rollout=rollout,
        prompts_per_rollout=rollout // options.num_generations,
        num_iterations=options.num_iterations,
    )


def _completions_per_step(options: TrainingOptions, world_size: int) -> int:
    per_device = options.per_device_train_batch_size
    accumulation = options.gradient_accumulation_steps
    by_batch_size = per_device * accumulation * world_size
    if options.num_prompts is None:
        return by_batch_size
    by_prompts = options.num_prompts * options.num_generations
    untouched = (per_device, accumulation) == DEFAULT_BATCH
    if not untouched and by_batch_size != by_prompts:
        raise ValueError(
            f"num_prompts {options.num_prompts} * num_generations {options.num_generations} is "
            f"{by_prompts} completions per step, but per_device_train_batch_size {per_device} "
            f"* gradient_accumulation_steps {accumulation} * {world_size} process(es) is "
            f"{by_batch_size}; leave the batch sizes out, or num_prompts (train_batch_size sets it)"
        )
    return by_prompts


def _completions_per_rollout(options: TrainingOptions, step: int) -> int:
    accumulation = options.gradient_accumulation_steps
    if options.generation_batch_size is None:
        micro_steps = options.steps_per_generation or accumulation
        if micro_steps % accumulation:
            raise ValueError(
                f"steps_per_generation is {micro_steps}, not a multiple of "
                f"gradient_accumulation_steps {accumulation}; a rollout feeds whole optimizer steps"
            )
        return step * (micro_steps // accumulation)
    if options.generation_batch_size % step:
        raise ValueError(
            f"generation_batch_size is {options.generation_batch_size}, not a multiple of the "
            f"{step} completions of an optimizer step; a rollout feeds whole optimizer steps "
            "(num_prompts, steps_per_generation)"
        )
    return options.generation_batch_size
