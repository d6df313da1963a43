"""How it is used: the page and its sessions. Never imports torch."""
