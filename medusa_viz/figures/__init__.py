"""How it is drawn: plain Plotly dicts from records. Never imports torch."""
