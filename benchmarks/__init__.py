"""Figures that README and issues promise, each measured by one command; see README.md here."""
