"""One module per verb; each imports what is heavy only when it runs."""
