"""The reward `gym`: scores of reasoning-gym. They are computed in sandboxed workers, since some
scorers evaluate the model's text."""

from __future__ import annotations

import inspect
import json
import os
import re
import sys
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import Future
from importlib.util import find_spec
from typing import Any

from rloo.addons.graders.code.isolation import ISOLATION_BACKENDS
from rloo.addons.graders.code.packages import fault_of, library_of
from rloo.addons.graders.code.sandbox_pool import (
    AllowedModules,
    ResourceLimits,
    SandboxPool,
    choose_isolation,
)
from rloo.addons.integrations.reasoning_gym import gym_tasks
from rloo.config.optional_packages import install
from rloo.distributed import value_codec
from rloo.distributed.platform_info import num_processors
from rloo.distributed.worker_pool import wait_result
from rloo.distributed.worker_process import WorkerDied
from rloo.rewards.completion_text import text_of
from rloo.types import Text

_MODULE = "reasoning_gym"
_TAGGED = re.compile(r"<answer>(.*?)</answer>", re.DOTALL)
# Longer than any answer of the library. The limit exists since some scorers take quadratic time.
_MOST_CHARACTERS = 20_000
# Most answers in one request, and the share of the time limit after which no further answer is
# scored.
_AT_ONCE, _SHARE = 64, 0.5
_MOST_WORKERS = 4
_IMPORT = f"from {value_codec.__name__} import Codec\n"
_DEFINE = """
import sys, types
codec = sys.modules[{name!r}] = types.ModuleType({name!r})
exec({source!r}, vars(codec))
Codec = codec.Codec
"""
# Printed output of the library must not be parsed as a score.
_MAIN = """
import os, sys
if list(sys.version_info[:2]) != {version}:
    raise SystemExit("behind the wall is Python %s.%s" % sys.version_info[:2])
_factory()
_told = os.fdopen(os.dup(1), "w")
_nowhere = os.open(os.devnull, os.O_WRONLY)
os.dup2(_nowhere, 1)
os.dup2(_nowhere, 2)
def _tell(line):
    _told.write(line)
    _told.flush()
_given = json.load(sys.stdin)
_tell('"ready"\\n')
score_all(_given["pairs"], _given["seconds"], _tell)
os._exit(0)
"""

Pair = tuple[str, str]


def make_gym(
    *,
    seconds: float = 5.0,
    memory: int = 2 << 30,
    wall: str | None = None,
    workers: int | None = None,
) -> GymReward:
    """A `GymReward`. A scorer has at least half of `seconds` for an answer, and `memory` bytes.
    `wall` is `bwrap` or `landlock`; the default is the first that works on this machine. `workers`
    is the number of parallel workers; the default is one per processor, at most 4."""
    if wall not in (None, *ISOLATION_BACKENDS):
        raise ValueError(
            f"wall is {wall!r}; it is {' or '.join(ISOLATION_BACKENDS)} (option of gym)"
        )
    if not 0 < seconds <= 600:
        raise ValueError(f"seconds is {seconds}; it is above 0 and at most 600 (option of gym)")
    if workers is not None and (type(workers) is not int or workers < 1):
        raise ValueError(f"workers is {workers!r}; it is a number of at least 1 (option of gym)")
    if not hasattr(os, "fork"):
        raise ValueError("the reward 'gym' needs Linux")
    limits = ResourceLimits(seconds=seconds, total_seconds=max(30.0, 2 * seconds), memory=memory)
    size = workers or min(_MOST_WORKERS, num_processors())
    return GymReward(wall, size, limits)


class GymReward:
    """A reward function: the score that the scorer of the row's task gives to the answer, from 0 to
    1, possibly a partial score. The reward needs the column `entry`, which rows of `gym:NAME` have.

    The answer is the content of the last `<answer>...</answer>`, or else the complete completion.

    The reward is None if scoring failed: the scorer raised an error, took too long or needed too
    much memory, or the sandbox failed. The metric `rewards/gym_reward/unjudged` is the share of
    such answers.
    """

    def __init__(self, wall: str | None, size: int, limits: ResourceLimits) -> None:
        self.__name__ = "gym_reward"
        self._wall, self._size, self._limits = wall, size, limits
        self._staff: SandboxPool | None = None

    def check_columns(self, columns: Iterable[str]) -> None:
        """Raise ValueError if the dataset has no reasoning-gym problems, no sandbox works on this
        machine, or the library cannot be loaded in it."""
        known = sorted(columns)
        if "entry" not in known:
            raise ValueError(
                "the reward 'gym' needs the column 'entry', which datasets gym:NAME have; the "
                f"dataset has: {', '.join(known) or 'no column'} (reward, dataset)"
            )
        self._begin_staff()

    def __call__(
        self,
        completions: Sequence[Text],
        entry: Sequence[str | None],
        log_metric: Callable[[str, float], None] | None = None,
    ) -> list[float | None]:
        """The rewards of the completions. Equal answers to a problem are scored once."""
        pairs = [
            None if given is None else (given, answer_of(text_of(text)))
            for text, given in zip(completions, entry, strict=True)
        ]
        found = self._score([pair for pair in dict.fromkeys(pairs) if pair is not None])
        rewards = [None if pair is None else found[pair] for pair in pairs]
        if log_metric is not None and completions:
            unjudged = sum(pair is not None and found[pair] is None for pair in pairs)
            log_metric("rewards/gym_reward/unjudged", unjudged / len(completions))
        return rewards

    def close(self) -> None:
        """Stop the workers. The next call starts new workers."""
        if self._staff is not None:
            self._staff.close()
            self._staff = None

    def _score(self, pairs: list[Pair]) -> dict[Pair, float | None]:
        staff, found = self._begin_staff(), dict[Pair, float | None]()
        size = min(_AT_ONCE, max(1, -(-len(pairs) // self._size)))
        waiting = [pairs[first : first + size] for first in range(0, len(pairs), size)]
        try:
            while waiting:
                begun = [(some, staff.submit(self._request(some))) for some in waiting]
                waiting = []
                for some, future in begun:
                    scores = self._scores_of(some, future)
                    found.update(zip(some, scores, strict=False))
                    if rest := some[len(scores) :]:
                        waiting.append(rest)
        finally:
            staff.cancel_pending()  # stops the workers after Ctrl-C or a deadline
        return found

    def _scores_of(self, pairs: list[Pair], future: Future[dict[str, Any]]) -> list[float | None]:
        """The scores of the first pairs, at least one: the pairs scored in time, followed by None
        for a pair whose scoring killed the program."""
        try:
            answer = wait_result(future)
        except WorkerDied:  # the sandbox failed several times
            return [None] * len(pairs)
        *lines, _ = answer.get("output", "").split("\n")
        scores = [None if line == "null" else float(line) for line in lines[1:]]
        ended_itself = answer.get("status") == 0
        return scores if ended_itself and scores else [*scores, None][: len(pairs)]

    def _request(self, pairs: list[Pair]) -> dict[str, Any]:
        given = {"pairs": pairs, "seconds": _SHARE * self._limits.seconds}
        return {"kind": "run", "program": _program(), "given": json.dumps(given)}

    def _begin_staff(self) -> SandboxPool:
        if self._staff is None:
            wall = choose_isolation(self._wall)
            staff = SandboxPool(wall, self._size, self._limits, library=library_here())
            fault = fault_of(staff, self._request([]), '"ready"\n')
            if fault is not None:
                raise ValueError(
                    f"the reward 'gym' loads reasoning-gym behind the wall {wall}, which failed: "
                    f"{fault}, and its user must be able to read the library's folder (reward)"
                )
            self._wall, self._staff = wall, staff
        return self._staff


def answer_of(text: str) -> str:
    """The part of a completion that is scored, without surrounding white space."""
    tagged = _TAGGED.findall(text)
    return (tagged[-1] if tagged else text).strip()[:_MOST_CHARACTERS]


def library_here() -> AllowedModules:
    """The `AllowedModules` for reasoning-gym, with the folders that it needs. Raises ValueError if
    it is not installed."""
    if find_spec(_MODULE) is None:
        raise ValueError(f"the reward 'gym' needs reasoning-gym; {install('gym')} (reward)")
    return library_of([_MODULE], "gym")


def _program() -> str:
    source, codec = inspect.getsource(gym_tasks), inspect.getsource(value_codec)
    # The sandbox has no `rloo` package.
    source = source.replace(_IMPORT, _DEFINE.format(name=value_codec.__name__, source=codec))
    return source + _MAIN.replace("{version}", str(list(sys.version_info[:2])))
