"""Files from others and from users: JSON, sizes that they may declare, Python, and renamed
fields."""
