"""transformers' `accelerator_config`: fields without effect here, and refused fields."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from rloo.config.fields import coerce, suggest
from rloo.config.file_checks import check_file, reading

_LARGEST = 1_000_000
# Fields of AcceleratorConfig -> defaults. Every process selects its prompts by the same data
# position. Settings for reading, splitting, filling, shuffling and moving batches have no effect.
DEFAULTS = {
    "split_batches": False, "dispatch_batches": None, "even_batches": True,
    "use_seedable_sampler": True, "non_blocking": False, "gradient_accumulation_kwargs": None,
    "use_configured_state": False,
}  # fmt: skip
# Fields that would change a step -> the options to use instead (for the error message).
_REFUSED = {
    "split_batches": "per_device_train_batch_size counts the completions of one process, and "
    "num_prompts the prompts of all",
    "gradient_accumulation_kwargs": "gradients are added up over gradient_accumulation_steps",
}


def read_accelerator_config(given: Any) -> dict[str, Any]:
    """All fields of `accelerator_config`. `given` is a mapping, an AcceleratorConfig or a JSON file
    with some of the fields; the others have their defaults. Raises ValueError for an unknown field,
    and for a value that would change the optimizer steps."""
    if isinstance(given, str) and not given.lstrip().startswith("{"):
        check_file(given, "accelerator_config", most=_LARGEST)
        with reading(given, "accelerator_config"):
            given = json.loads(Path(given).read_text(encoding="utf-8"))
    if hasattr(given, "to_dict") and not isinstance(given, type):
        given = given.to_dict()
    given = coerce("accelerator_config", dict[str, Any], {} if given is None else given)
    for name, value in given.items():
        if name not in DEFAULTS:
            raise ValueError(f"accelerator_config has no {name}{suggest(name, DEFAULTS)}")
        if value and name in _REFUSED:
            raise ValueError(f"accelerator_config has {name} {value}; {_REFUSED[name]}")
    return DEFAULTS | given
