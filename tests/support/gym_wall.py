"""Whether scorers of reasoning-gym can run behind a wall here."""

from rloo.rewards.code.staff import why_not
from rloo.rewards.code.walls import WALLS
from rloo.rewards.gym import library_here


def why_not_scored() -> str:
    """Why not; empty where they can."""
    reasons = [reason for wall in WALLS if (reason := why_not(wall)) is not None]
    if len(reasons) == len(WALLS):
        return "; ".join(reasons)
    try:
        library_here()
    except ValueError as error:
        return str(error)
    return ""
