"""Conversations and the verifier's own answers to them."""
