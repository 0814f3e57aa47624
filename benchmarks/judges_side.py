"""The verdicts of another judge on pairs. The file is run by path, without this package:

    PYTHON benchmarks/judges_side.py math-verify|trl|verl [FOLDER ...] < pairs.json

Standard input is a list of [reference, completion]. The last line of standard output is a list of
true, false and null (no verdict within a minute). The folders are put at the beginning of sys.path.
"""

from __future__ import annotations

import json
import logging
import re
import signal
import sys
from collections.abc import Callable
from typing import Any

# Wall-clock seconds for one pair, and seconds until the next alarm if a judge catches the first
# one.
_SECONDS, _SECONDS_MORE = 60.0, 5.0
_LATEX = re.compile(r"\$|\\\(|\\\[|\\boxed")


def _as_latex(reference: str) -> str:
    """A reference as these judges expect it: as a formula, in dollar signs if it has none."""
    return reference if _LATEX.search(reference) else f"${reference}$"


def _math_verify() -> Callable[[str, str], bool | None]:
    from math_verify import parse, verify

    def judge(reference: str, completion: str) -> bool | None:
        gold = parse(_as_latex(reference))
        return bool(verify(gold, parse(completion))) if gold else None

    return judge


def _trl() -> Callable[[str, str], bool | None]:
    from trl.rewards import accuracy_reward

    def judge(reference: str, completion: str) -> bool | None:
        messages: Any = [[{"role": "assistant", "content": completion}]]
        (score,) = accuracy_reward(messages, [_as_latex(reference)])
        return None if score is None else score == 1.0

    return judge


def _verl() -> Callable[[str, str], bool | None]:
    from verl.utils.reward_score.prime_math import compute_score

    return lambda reference, completion: bool(compute_score(completion, reference)[0])


_SIDES = {"math-verify": _math_verify, "trl": _trl, "verl": _verl}


def _stop(*_: Any) -> None:
    raise TimeoutError


def main() -> None:
    """Judge the pairs of standard input."""
    signal.signal(signal.SIGALRM, _stop)
    sys.path[:0] = sys.argv[2:]
    logging.disable(logging.CRITICAL)
    judge, verdicts = _SIDES[sys.argv[1]](), []
    for reference, completion in json.load(sys.stdin):
        signal.setitimer(signal.ITIMER_REAL, _SECONDS, _SECONDS_MORE)
        try:
            verdicts.append(judge(reference, completion))
        except Exception:
            verdicts.append(None)
        finally:
            signal.setitimer(signal.ITIMER_REAL, 0)
    print(json.dumps(verdicts))


if __name__ == "__main__":
    main()
