"""Files of others and of users: JSON and sizes they may declare, Python, fields once renamed."""
