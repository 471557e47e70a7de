"""Code that the commands share: how they end, ask for consent, and report progress and versions."""
