"""The command `rloo config --from SYSTEM FILE [OVERRIDES]`."""

from __future__ import annotations

from rloo.addons.importers import IMPORTERS, import_config, render_imported


def import_command(arguments: list[str]) -> str:
    """Another system's configuration as YAML for `rloo train`."""
    if len(arguments) < 2:
        raise ValueError(
            f"--from takes a system ({', '.join(IMPORTERS)}) and its file, script, or command line"
            " in quotes, and then overrides as that system takes them"
        )
    system, source, *overrides = arguments
    return render_imported(system, import_config(system, source, overrides))
