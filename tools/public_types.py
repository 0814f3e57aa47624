"""Checks that the types of a package's public symbols are known: `python tools/public_types.py`.

    python tools/public_types.py [PACKAGE] [--source FOLDER]    # default: rloo, in src/

basedpyright reads the package as a user's type checker does (`--verifytypes`). Types that other
packages leave unknown do not count. The output is the share of known symbols, and the place of each
other symbol: first the symbols with an incomplete declaration, then the symbols that only use them.
The exit status is 1 if a type is not known.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

SOURCE = Path(__file__).resolve().parent.parent / "src"
# In the message about a symbol whose declaration uses another symbol that is not known.
USES_ANOTHER = "partially unknown"


@dataclass(frozen=True)
class Finding:
    """A public symbol whose type is unknown, or is inferred differently by type checkers. `reason`
    is the first line of basedpyright's message, `place` the file and the line."""

    name: str
    reason: str
    place: str

    def __str__(self) -> str:
        return f"{self.name}: {self.reason} ({self.place})"


def check(package: str, source: Path) -> tuple[int, list[Finding]]:
    """The number of public symbols of `package` in the folder `source`, and the findings. Raises
    ValueError if the package cannot be checked."""
    done = subprocess.run(
        [
            *(sys.executable, "-m", "basedpyright", "--pythonpath", sys.executable),
            *("--verifytypes", package, "--ignoreexternal", "--outputjson"),
        ],
        cwd=source,
        env=os.environ | {"PYTHONPATH": str(source)},
        capture_output=True,
        text=True,
    )
    try:
        result = json.loads(done.stdout)
    except json.JSONDecodeError:
        raise ValueError(f"basedpyright failed: {done.stderr.strip()}") from None
    symbols = [s for s in result["typeCompleteness"]["symbols"] if s["isExported"]]
    if not symbols:
        errors = "; ".join(error["message"] for error in result["generalDiagnostics"])
        raise ValueError(f"{package} in {source} has no public symbol: {errors or 'it is empty'}")
    bad = [s for s in symbols if s["isTypeAmbiguous"] or not s["isTypeKnown"]]
    return len(symbols), sorted(
        (_finding(symbol, source) for symbol in bad),
        key=lambda found: (USES_ANOTHER in found.reason, found.place, found.name),
    )


def _finding(symbol: dict[str, Any], source: Path) -> Finding:
    errors = [d for d in symbol["diagnostics"] if d["severity"] == "error"]
    errors.sort(key=lambda error: USES_ANOTHER in error["message"])
    if not errors:  # a name that is imported from the module of its definition
        return Finding(symbol["name"], f"its type is {USES_ANOTHER}", "elsewhere")
    place = "its base classes"
    if errors[0]["file"]:
        file = Path(errors[0]["file"]).resolve().relative_to(source.resolve())
        place = f"{file.as_posix()}:{errors[0]['range']['start']['line'] + 1}"
    return Finding(symbol["name"], errors[0]["message"].partition("\n")[0], place)


def main(arguments: Sequence[str] | None = None) -> int:
    """Print the share and the findings. Returns the exit status."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("package", nargs="?", default="rloo")
    parser.add_argument("--source", type=Path, default=SOURCE)
    options = parser.parse_args(arguments)
    count, findings = check(options.package, options.source)
    known = count - len(findings)
    print(f"{known:,} of {count:,} public symbols have a known type ({known / count:.2%})")
    print(*findings, sep="\n", end="\n" if findings else "")
    return int(bool(findings))


if __name__ == "__main__":
    sys.exit(main())
