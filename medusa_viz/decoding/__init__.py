"""How it decodes: tree, acceptance, the four-phase step, records."""
