"""Lists, compares and plots runs from the files in their folders."""
