"""Carries a plan out: runs its units, writes files, verifies them and publishes them."""
