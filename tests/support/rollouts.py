"""What a rollout_func of tests does."""


def speak_twice(ids, trainer, told, lengths):
    """The model speaks, is told some tokens, and speaks again, in turns of at most these `lengths`.
    Returns both turns of each row, and what a rollout_func returns of them."""
    first = trainer.engine.turn(ids, lengths[0])
    rows = [i + f.token_ids + told for i, f in zip(ids, first, strict=True)]
    both = list(zip(first, trainer.engine.turn(rows, lengths[1]), strict=True))
    between = [-9.0] * len(told), [0] * len(told)  # log-probs that nothing may read
    return both, {
        "prompt_ids": ids,
        "completion_ids": [a.token_ids + told + b.token_ids for a, b in both],
        "logprobs": [a.policy_logprobs + between[0] + b.policy_logprobs for a, b in both],
        "env_mask": [[1] * len(a.token_ids) + between[1] + [1] * len(b.token_ids) for a, b in both],
    }
