"""π0-FAST: action chunks written by the language model, token by token."""
