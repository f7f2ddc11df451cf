"""Checks outputs: against their manifest, against their source, and for what a loader makes of them."""
