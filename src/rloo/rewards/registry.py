"""Loads the reward function that a spec names: a built-in reward, or a function of a module or a
file. The module or file is executed: never take a spec from the text of a model or a dataset."""

from __future__ import annotations

import ast
import inspect
import os
import re
from collections.abc import Callable, Mapping
from difflib import get_close_matches
from typing import Any

from rloo import plugins
from rloo.config.user_functions import check_function, load_function

# Names of similar rewards in other systems -> names here.
_ELSEWHERE = {
    "accuracy": "math", "accuracy_reward": "math", "reasoning_accuracy_reward": "math",
    "math_verify": "math", "math_reward": "math", "think_format_reward": "format",
    "binary_code": "code", "code_reward": "code", "format_reward": "format",
    "soft_overlong_punishment": "soft_overlong",
    "get_soft_overlong_punishment": "soft_overlong", "repetition_penalty": "repetition",
}  # fmt: skip
# Rewards of open-r1 without an equivalent here -> reason.
_NOT_HERE = {
    **dict.fromkeys(
        ("ioi_code", "cf_code"),
        "it asks a server; code runs programs here, in columns of its own",
    ),
    "code_format": "its language changes with the row",
    "cosine": "it grades wrong answers by their length; math and soft_overlong are verdict and "
    "length, apart",
    "reasoning_steps": "it counts words, so that `First, First, First,` is worth 1",
}
_CALL = re.compile(r"\w+\s*\(.*\)", re.DOTALL)


def load_reward(spec: str | Mapping[str, Any] | Callable[..., Any]) -> Callable[..., Any]:
    """The reward function that `spec` names; a callable is returned as it is.

    - `gsm8k`: a built-in reward,
    - `length(target_min=10, target_max=50)`, or the mapping
      `{name: length, target_min: 10, target_max: 50}`: a built-in reward with options,
    - `package.module:function` or `path/to/file.py:function`: the user's own function.

    Raises ValueError for an unknown name (with the most similar name), for bad options, for a
    missing file or module, and for an attribute that is missing or not callable. Exceptions raised
    while importing the user's module are passed on.
    """
    if callable(spec):
        return spec
    if isinstance(spec, Mapping):
        options = {str(key): value for key, value in spec.items() if key != "name"}
        if not isinstance(spec.get("name"), str):
            raise ValueError(f"the reward {dict(spec)!r} has no name; write {{name: ...}}")
        return _load_named(spec["name"], options)
    if not isinstance(spec, str):
        raise ValueError(
            f"the reward {spec!r} is neither a name nor a function, nor a reward model, nor an "
            "object with get_rewards(prompts, completions) (reward_funcs)"
        )
    spec = spec.strip()
    if _CALL.fullmatch(spec):
        return _load_named(*_parse_call(spec))
    return _load_named(spec, {})


def check_reward(spec: str | Mapping[str, Any]) -> None:
    """Raise what `load_reward` raises, as far as possible without running a user's code."""
    if isinstance(spec, str) and ":" in spec and not _CALL.fullmatch(spec.strip()):
        check_function(spec.strip(), "reward")
    else:
        load_reward(spec)


def is_reward_model(name: Any) -> bool:
    """Return whether `name` is a folder or hub id of a reward model, not a function's name."""
    if not isinstance(name, str) or name in plugins.names("rewards"):
        return False
    is_code = name.endswith(".py") or bool(set(":(") & set(name))  # file.py:function, name(options)
    return os.path.isdir(name) or ("/" in name and not is_code)


def check_folder(name: str) -> None:
    """Raise ValueError for a reward model folder that contains an adapter or no model."""
    there = [file for file in ("config.json", "adapter_config.json") if _is_in(name, file)]
    if os.path.isdir(name) and "config.json" not in there:
        why = (
            "is an adapter, and a reward model must be a whole classifier; merge it into its base "
            "first (peft: merge_and_unload, then save_pretrained)"
            if there
            else "is a folder without config.json, so no model was saved there"
        )
        raise ValueError(f"the reward model {name} {why} (reward)")


def _is_in(folder: str, file: str) -> bool:
    return os.path.exists(os.path.join(folder, file))


def _load_named(name: str, options: dict[str, Any]) -> Callable[..., Any]:
    built_in = sorted(plugins.names("rewards"))
    if name in built_in:
        return _made(name, plugins.load("rewards", name), options)
    if options:
        raise ValueError(_no_options(name, options))
    if ":" in name:
        return load_function(name, "reward")
    if name.endswith(".py"):
        raise ValueError(f"the reward {name!r} names no function; write {name}:function")
    if name in _NOT_HERE:
        raise ValueError(
            f"the reward {name!r}, of open-r1, is not built in: {_NOT_HERE[name]}; give a function "
            "of your own, file.py:function (reward)"
        )
    nearest = [_ELSEWHERE[name]] if name in _ELSEWHERE else get_close_matches(name, built_in, n=1)
    hint = f"; did you mean {nearest[0]!r}?" if nearest else ""
    raise ValueError(
        f"unknown reward {name!r}{hint} (built in: {', '.join(built_in)}; your own: "
        "package.module:function or file.py:function; a reward model: a folder or owner/name)"
    )


def _made(name: str, found: Callable[..., Any], options: dict[str, Any]) -> Callable[..., Any]:
    """Return `found` if it is a reward function, else the reward function that the factory `found`
    returns for `options`. A reward function has the parameter `completions`, as in TRL; a factory
    has not."""
    known = inspect.signature(found).parameters
    if "completions" in known:
        if options:
            raise ValueError(_no_options(name, options))
        return found
    try:
        made: Callable[..., Any] = found(**options)
    except TypeError as error:
        raise ValueError(
            f"the options {options} do not fit the reward {name!r}: {error} "
            f"(options: {', '.join(known)})"
        ) from error
    return made


def _no_options(name: str, options: Mapping[str, Any]) -> str:
    return f"the reward {name!r} takes no options, but got {', '.join(options)}"


def _parse_call(spec: str) -> tuple[str, dict[str, Any]]:
    """Parse `name(key=literal, ...)` without evaluating it."""
    example = "length(target_min=10, target_max=50)"
    try:
        match ast.parse(spec, mode="eval").body:
            case ast.Call(ast.Name(name), [], given) if all(k.arg for k in given):
                return name, {str(k.arg): ast.literal_eval(k.value) for k in given}
        raise ValueError("options are given by name")
    except (ValueError, SyntaxError) as error:
        raise ValueError(f"cannot read the reward {spec!r}: {error}; write {example}") from error
