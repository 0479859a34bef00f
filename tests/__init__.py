"""Tests; `make test` runs all but those marked long."""
