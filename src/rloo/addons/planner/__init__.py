"""How long a run takes and how much memory it needs, before it starts."""
