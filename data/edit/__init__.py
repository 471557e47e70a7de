"""Editing of datasets: choosing and trimming episodes, renaming, joining and re-encoding."""
