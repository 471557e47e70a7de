"""Runs listed, compared and plotted from what they left in their folders."""
