"""Whether scorers of reasoning-gym can run behind a wall here."""

from rloo.addons.graders.code.isolation import ISOLATION_BACKENDS
from rloo.addons.graders.code.sandbox_pool import unavailable_reason
from rloo.addons.integrations.reasoning_gym.gym_reward import library_here


def why_not_scored() -> str:
    """Why not; empty where they can."""
    reasons = [
        reason for wall in ISOLATION_BACKENDS if (reason := unavailable_reason(wall)) is not None
    ]
    if len(reasons) == len(ISOLATION_BACKENDS):
        return "; ".join(reasons)
    try:
        library_here()
    except ValueError as error:
        return str(error)
    return ""
