"""Whether scorers of reasoning-gym can run behind a wall here."""

from rloo.addons.graders.code.isolation import WALLS
from rloo.addons.graders.code.sandbox_pool import why_not
from rloo.addons.integrations.reasoning_gym.gym_reward import library_here


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
