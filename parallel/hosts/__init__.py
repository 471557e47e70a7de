"""Processes of a job: how they start, agree, are watched, and end."""
