"""The ladder from the recipe's beginnings to ours."""
