"""Built-in families of models, each a folder with all that is its own."""
