"""What people type: `python -m tools.<command>`, thin command lines over the other folders."""
