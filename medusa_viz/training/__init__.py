"""Where heads come from: token files, objectives, trainer."""
