"""`rloo doctor`."""

from __future__ import annotations

from pathlib import Path

from rloo.addons.report.doctor.doctor_command import report
from rloo.algorithm.stop_signals import StopSignals
from rloo.config.launcher_env import check_alone
from rloo.distributed.standard_streams import show
from rloo.trainer.preflight import read_options


def doctor(arguments: list[str], signals: StopSignals) -> int:
    """Run `rloo doctor`: diagnose a run folder, or a configuration before it runs."""
    words = [a for a in arguments if a[:1] != "-" and "=" not in a]
    if len(arguments) == len(words) == 1 and not words[0].endswith((".yaml", ".yml")):
        for line in report(Path(words[0])):
            show(line)
        return 0
    config = read_options(arguments)
    check_alone("doctor")
    with signals.ending():
        from rloo.addons.report.doctor.dry_run import examine

    for line in examine(config, tuple(arguments)):
        show(line)
    return 0
