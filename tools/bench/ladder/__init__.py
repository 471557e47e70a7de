"""The ladder from the way the recipe's authors began to ours."""
