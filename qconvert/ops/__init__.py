"""Defines the steps of a unit: what each makes of an encoding, and of rows."""
